"""Tensors of Llama and its relatives in model.safetensors: separate queries, keys, values, gate and up projection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.hugging_face import TensorMap
from megatron_lowprec.training.models.common.tensor_layout import concatenate, join_qkv, split_qkv
from megatron_lowprec.training.options.parts import ModelShape


def known_name(name: str) -> str | None:
    """The same name; None for rope's frequencies in older files."""
    return None if name.endswith(".rotary_emb.inv_freq") else name


def tensor_maps(config: Config) -> Iterator[TensorMap]:
    """Every weight of a dense model once, except the output layer's."""

    def parts(layer: int, ours: str, theirs: str) -> Iterator[TensorMap]:
        yield from attention_maps(config.shape, ours, theirs)
        yield from gated_mlp_maps(f"{ours}.mlp", f"{theirs}.mlp")

    return decoder_maps(config.shape, parts)


def decoder_maps(shape: ModelShape, parts: Callable[[int, str, str], Iterable[TensorMap]]) -> Iterator[TensorMap]:
    """Embedding and norms, and attention and MLP of each layer by ``parts``, which takes its number and both names."""
    yield TensorMap("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    for layer in range(shape.num_layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        yield TensorMap(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",))
        yield TensorMap(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        yield from parts(layer + 1, ours, theirs)
    yield TensorMap("decoder.final_layernorm.weight", ("model.norm.weight",))


def attention_maps(shape: ModelShape, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Attention of a layer of these names."""
    for part in ("weight", "bias") if shape.add_qkv_bias else ("weight",):
        yield TensorMap(
            f"{ours}.self_attention.linear_qkv.{part}",
            tuple(f"{theirs}.self_attn.{name}_proj.{part}" for name in "qkv"),
            to_hf=lambda tensor: split_qkv(shape, tensor),
            from_hf=lambda tensors: join_qkv(shape, *tensors),
        )
    for name in "qk" if shape.qk_layernorm else "":
        yield TensorMap(f"{ours}.self_attention.{name}_layernorm.weight", (f"{theirs}.self_attn.{name}_norm.weight",))
    yield TensorMap(f"{ours}.self_attention.linear_proj.weight", (f"{theirs}.self_attn.o_proj.weight",))


def gated_mlp_maps(
    ours: str, theirs: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[TensorMap]:
    """Weights of a gated MLP without biases, whose gate and up projection Hugging Face stores apart."""
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    yield TensorMap(f"{ours}.linear_fc1.weight", (gate, up), to_hf=lambda tensor: tensor.chunk(2), from_hf=concatenate)
    yield TensorMap(f"{ours}.linear_fc2.weight", (down,))
