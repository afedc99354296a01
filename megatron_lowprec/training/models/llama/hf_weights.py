"""Tensors of Llama and its relatives in model.safetensors: separate queries, keys, values, gate and up projection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.interface import TensorMap
from megatron_lowprec.training.models.common.tensor_layout import gated_mlp_maps, join_qkv, split_qkv
from megatron_lowprec.training.options.parts import ModelShape


def known_name(name: str) -> str | None:
    """The same name; None for rope's frequencies in older files."""
    return None if name.endswith(".rotary_emb.inv_freq") else name


def tensor_maps(config: Config) -> Iterator[TensorMap]:
    """Every weight once, except the output layer's."""
    return maps_with_mlp(config.shape, lambda ours, theirs: gated_mlp_maps(f"{ours}.mlp", f"{theirs}.mlp"))


def maps_with_mlp(shape: ModelShape, mlp_maps: Callable[[str, str], Iterable[TensorMap]]) -> Iterator[TensorMap]:
    """As ``tensor_maps``; ``mlp_maps`` has those of a layer's MLP, from the names of the layer here and there."""
    yield TensorMap("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    for layer in range(shape.num_layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        yield TensorMap(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",))
        yield TensorMap(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        yield TensorMap(
            f"{ours}.self_attention.linear_qkv.weight",
            tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv"),
            to_hf=lambda tensor: split_qkv(shape, tensor),
            from_hf=lambda tensors: join_qkv(shape, *tensors),
        )
        if shape.add_qkv_bias:
            yield TensorMap(
                f"{ours}.self_attention.linear_qkv.bias",
                tuple(f"{theirs}.self_attn.{name}_proj.bias" for name in "qkv"),
                to_hf=lambda tensor: split_qkv(shape, tensor),
                from_hf=lambda tensors: join_qkv(shape, *tensors),
            )
        if shape.qk_layernorm:
            for name in "qk":
                yield TensorMap(
                    f"{ours}.self_attention.{name}_layernorm.weight", (f"{theirs}.self_attn.{name}_norm.weight",)
                )
        yield TensorMap(f"{ours}.self_attention.linear_proj.weight", (f"{theirs}.self_attn.o_proj.weight",))
        yield from mlp_maps(ours, theirs)
    yield TensorMap("decoder.final_layernorm.weight", ("model.norm.weight",))
