"""DeepSeek-V3: latent attention, sigmoid scores with a balancing bias, dense layers before experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.hugging_face import HuggingFace, TensorMap
from megatron_lowprec.training.models.common.layer_pattern import has_experts, layers_with_experts
from megatron_lowprec.training.models.common.llama_like import ACTIVATION, KEYS, OPTIONS
from megatron_lowprec.training.models.common.llama_tensors import decoder_maps, gated_mlp_maps, known_name
from megatron_lowprec.training.models.common.rope import plain_base

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
_BEST_OF_A_GROUP = 2  # scores whose sum ranks a group


def _unsupported(config: Config) -> list[str]:
    if not config.num_experts or config.num_layers is None:
        return ["a dense MLP in all layers"]
    found = [] if _dense_layers(config) is not None else [f"--moe-layer-freq {config.moe_layer_freq}"]
    shared, width = config.moe_shared_expert_intermediate_size or 0, config.moe_ffn_hidden_size or 1
    if not shared or shared % width:
        found.append(f"--moe-shared-expert-intermediate-size {shared}")
    best = config.moe_router_topk // config.moe_router_group_topk if config.moe_router_group_topk else _BEST_OF_A_GROUP
    if config.moe_router_topk < 2 or best != _BEST_OF_A_GROUP:
        found.append(f"--moe-router-topk {config.moe_router_topk}")
    return found


def _dense_layers(config: Config) -> int | None:
    """Number of dense layers, None if experts come before one."""
    pattern = layers_with_experts(config)
    dense = pattern.index(True)
    return dense if all(pattern[dense:]) else None


def _to_config(config: Config) -> dict[str, Any]:
    return {
        "first_k_dense_replace": _dense_layers(config),
        "num_key_value_heads": config.num_attention_heads,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.experts.moe_ffn_hidden_size,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        "rope_theta": float(config.rotary_base),
    }


def _from_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Layers, experts and router; UserError for another number of keys and values than of queries."""
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    if groups not in (None, heads):
        raise UserError(f"config.json has num_key_value_heads {groups}; latent attention has one for each of {heads}")
    dense, layers = hf["first_k_dense_replace"], hf["num_hidden_layers"]
    grouped = hf["n_group"] > 1
    return {
        "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})" if dense else "1",
        "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
        "moe_router_num_groups": hf["n_group"] if grouped else None,
        "moe_router_group_topk": hf["topk_group"] if grouped else None,
        "moe_router_dtype": "fp32",
        "rotary_base": plain_base(hf),
        "hidden_dropout": 0.0,
    }


def _tensor_maps(config: Config) -> Iterator[TensorMap]:
    """Weights and balancing biases; experts one by one."""
    absent = ("linear_q_proj",) if config.q_lora_rank else _OF_QUERY_LATENT

    def parts(layer: int, ours: str, theirs: str) -> Iterator[TensorMap]:
        for name, its_name in _OF_ATTENTION.items():
            if name not in absent:
                yield TensorMap(f"{ours}.self_attention.{name}.weight", (f"{theirs}.self_attn.{its_name}.weight",))
        if not has_experts(config, layer):
            yield from gated_mlp_maps(f"{ours}.mlp", f"{theirs}.mlp")
            return
        yield TensorMap(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.gate.weight",))
        bias = f"{theirs}.mlp.gate.e_score_correction_bias"
        yield TensorMap(f"{ours}.mlp.router.expert_bias", (bias,), keeps_dtype=True)  # fp32: its steps are small
        yield from gated_mlp_maps(f"{ours}.mlp.shared_experts", f"{theirs}.mlp.shared_experts")
        for expert in range(config.experts.num_experts):
            yield from gated_mlp_maps(f"{ours}.mlp.experts.local_experts.{expert}", f"{theirs}.mlp.experts.{expert}")

    return decoder_maps(config.shape, parts)


DEEPSEEK_V3 = HuggingFace(
    model_type="deepseek_v3",
    title="DeepSeek-V3",
    class_name="DeepseekV3ForCausalLM",
    options={
        **OPTIONS,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "norm_epsilon": 1e-6,  # Hugging Face's norms of the latents have no other
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    keys={
        **KEYS,
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "num_experts": "n_routed_experts",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_router_topk": "num_experts_per_tok",
        "moe_router_topk_scaling_factor": "routed_scaling_factor",
    },
    variants={
        **ACTIVATION,
        "attention_bias": (False,),
        "norm_topk_prob": (True,),
        "rope_interleave": (True,),
        "rms_norm_eps": (1e-6,),
        "num_nextn_predict_layers": (0,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": None,  # that of the heads; transformers' 128 is for its own 128 heads
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    tensor_maps=_tensor_maps,
    known_name=known_name,
    unsupported=_unsupported,
    to_config=_to_config,
    from_config=_from_config,
)
