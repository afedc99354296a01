"""GPT-2's tensors in model.safetensors: transposed linear weights; queries, keys and values concatenated."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.interface import TensorMap
from megatron_lowprec.training.models.common.tensor_layout import concatenate, join_qkv, split_qkv, transpose

_LINEARS = (
    ("self_attention.linear_proj", "attn.c_proj"),
    ("mlp.linear_fc1", "mlp.c_fc"),
    ("mlp.linear_fc2", "mlp.c_proj"),
)


def known_name(name: str) -> str | None:
    """Name with the prefix that OpenAI's own files lack; None for the causal mask in these files."""
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def tensor_maps(config: Config) -> Iterator[TensorMap]:
    """Every weight once, except the output layer's."""
    yield TensorMap("embedding.word_embeddings.weight", ("transformer.wte.weight",))
    yield TensorMap("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for part in ("weight", "bias"):
        for layer in range(config.shape.num_layers):
            theirs, ours = f"transformer.h.{layer}", f"decoder.layers.{layer}"
            yield TensorMap(f"{ours}.input_layernorm.{part}", (f"{theirs}.ln_1.{part}",))
            yield TensorMap(f"{ours}.pre_mlp_layernorm.{part}", (f"{theirs}.ln_2.{part}",))
            yield TensorMap(
                f"{ours}.self_attention.linear_qkv.{part}",
                (f"{theirs}.attn.c_attn.{part}",),
                to_hf=lambda tensor: [transpose(concatenate(split_qkv(config.shape, tensor)))],
                from_hf=lambda tensors: join_qkv(config.shape, *transpose(tensors[0]).chunk(3)),
            )
            for linear, name in _LINEARS:
                yield TensorMap(
                    f"{ours}.{linear}.{part}",
                    (f"{theirs}.{name}.{part}",),
                    to_hf=lambda tensor: [transpose(tensor)],
                    from_hf=lambda tensors: transpose(tensors[0]),
                )
        yield TensorMap(f"decoder.final_layernorm.{part}", (f"transformer.ln_f.{part}",))
