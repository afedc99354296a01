"""DeepSeek-V3's tensors in model.safetensors: experts one by one, gate and up projection apart."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.interface import TensorMap
from megatron_lowprec.training.models.common.tensor_layout import gated_mlp_maps
from megatron_lowprec.training.models.moe.layer_pattern import has_experts

_OF_ATTENTION = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
_OF_QUERY_LATENT = ("linear_q_down_proj", "q_layernorm", "linear_q_up_proj")


def known_name(name: str) -> str | None:
    """The same name; None for rope's frequencies in older files."""
    return None if name.endswith(".rotary_emb.inv_freq") else name


def tensor_maps(config: Config) -> Iterator[TensorMap]:
    """Every weight and balancing bias once, except the output layer's."""
    yield TensorMap("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    absent = ("linear_q_proj",) if config.q_lora_rank else _OF_QUERY_LATENT
    for layer in range(config.shape.num_layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        yield TensorMap(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",))
        yield TensorMap(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        for name, its_name in _OF_ATTENTION.items():
            if name not in absent:
                yield TensorMap(f"{ours}.self_attention.{name}.weight", (f"{theirs}.self_attn.{its_name}.weight",))
        if not has_experts(config, layer + 1):
            yield from gated_mlp_maps(f"{ours}.mlp", f"{theirs}.mlp")
            continue
        yield TensorMap(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.gate.weight",))
        bias = f"{theirs}.mlp.gate.e_score_correction_bias"
        yield TensorMap(f"{ours}.mlp.router.expert_bias", (bias,), keeps_dtype=True)  # fp32: its steps are small
        yield from gated_mlp_maps(f"{ours}.mlp.shared_experts", f"{theirs}.mlp.shared_experts")
        for expert in range(config.experts.num_experts):
            yield from gated_mlp_maps(f"{ours}.mlp.experts.local_experts.{expert}", f"{theirs}.mlp.experts.{expert}")
    yield TensorMap("decoder.final_layernorm.weight", ("model.norm.weight",))
