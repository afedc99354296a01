"""A GPT's weights as the tensors of Hugging Face's GPT-2 or Llama, and back. torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.convert.hf_config import kind_of
from megatron_lowprec.training.convert.names import Weights
from megatron_lowprec.training.convert.qkv_layout import join_qkv, split_qkv
from megatron_lowprec.training.models.sizes import require


def to_hf_weights(config: Config, weights: Weights, vocab_size: int) -> Weights:
    """Tensors of model.safetensors; rows of the vocabulary that are padding are left out.

    Raises:
        UserError: a weight that is missing, or one that has no place.
    """
    rest, found = dict(weights), Weights()
    for place in _places(config):
        if place.ours not in rest:
            raise UserError(f"the checkpoint has no weight {place.ours}: it is damaged or of another model")
        found |= zip(place.theirs, place.out(rest.pop(place.ours)), strict=True)
    if rest:
        raise UserError(f"the checkpoint has weights that have no place: {', '.join(sorted(rest)[:5])}")
    for name in _OF_VOCABULARY & found.keys():
        found[name] = found[name][:vocab_size]
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_hf_weights(config: Config, tensors: Mapping[str, torch.Tensor], rows: int) -> Weights:
    """The inverse of ``to_hf_weights``; the vocabulary is padded to ``rows``, as ``pad_rows`` says.

    Raises:
        UserError: a tensor that is missing, or one that has no place.
    """
    rest = {_with_prefix(name): tensor for name, tensor in tensors.items() if not name.endswith(_BUFFERS)}
    if not config.untie_embeddings_and_output_weights:
        rest.pop("lm_head.weight", None)  # some files repeat the embedding
    for name in _OF_VOCABULARY & rest.keys():
        rest[name] = pad_rows(rest[name], rows)
    found = Weights()
    for place in _places(config):
        missing = [name for name in place.theirs if name not in rest]
        if missing:
            raise UserError(f"the safetensors have no {missing[0]}, which config.json asks for")
        found[place.ours] = place.back([rest.pop(name) for name in place.theirs]).contiguous()
    if rest:
        raise UserError(f"the safetensors have tensors that have no place: {', '.join(sorted(rest)[:5])}")
    return found


_OF_VOCABULARY = {"transformer.wte.weight", "model.embed_tokens.weight", "lm_head.weight"}
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # constants that older files hold


def _with_prefix(name: str) -> str:
    """OpenAI's own GPT-2 files name the bare transformer's tensors."""
    return name if name.startswith(("transformer.", "model.", "lm_head.")) else f"transformer.{name}"


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """More rows for a vocabulary, copies of the last one.

    Rows of zeros would be logits of 0, which a trained model may reach nowhere else: they would take all probability.
    """
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor[-1:].expand(missing, -1)]) if missing > 0 else tensor


@dataclass(frozen=True)
class _Place:
    """One of our weights and the tensors that hold it there."""

    ours: str
    theirs: tuple[str, ...]
    out: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda tensor: [tensor]
    back: Callable[[Sequence[torch.Tensor]], torch.Tensor] = lambda tensors: tensors[0]


def _places(config: Config) -> Iterator[_Place]:
    """Where every weight of the model goes, each once."""
    yield from _gpt2_places(config) if kind_of(config) == "gpt2" else _llama_places(config)
    if config.untie_embeddings_and_output_weights:
        yield _Place("output_layer.weight", ("lm_head.weight",))


def _gpt2_places(config: Config) -> Iterator[_Place]:
    yield _Place("embedding.word_embeddings.weight", ("transformer.wte.weight",))
    yield _Place("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for part in ("weight", "bias"):
        for layer in range(require(config.num_layers)):
            theirs, ours = f"transformer.h.{layer}", f"decoder.layers.{layer}"
            yield _Place(f"{ours}.input_layernorm.{part}", (f"{theirs}.ln_1.{part}",))
            yield _Place(f"{ours}.pre_mlp_layernorm.{part}", (f"{theirs}.ln_2.{part}",))
            yield _Place(
                f"{ours}.self_attention.linear_qkv.{part}",
                (f"{theirs}.attn.c_attn.{part}",),
                out=lambda tensor: [_turned(torch.cat(split_qkv(config, tensor)))],
                back=lambda tensors: join_qkv(config, *_turned(tensors[0]).chunk(3)),
            )
            for name, linear in (
                ("attn.c_proj", "self_attention.linear_proj"),
                ("mlp.c_fc", "mlp.linear_fc1"),
                ("mlp.c_proj", "mlp.linear_fc2"),
            ):
                yield _Place(
                    f"{ours}.{linear}.{part}",
                    (f"{theirs}.{name}.{part}",),
                    out=lambda tensor: [_turned(tensor)],
                    back=lambda tensors: _turned(tensors[0]),
                )
        yield _Place(f"decoder.final_layernorm.{part}", (f"transformer.ln_f.{part}",))


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """A weight as Hugging Face's GPT-2 multiplies with it, [in, out], or back; a bias is one already."""
    return tensor.t()


def _llama_places(config: Config) -> Iterator[_Place]:
    yield _Place("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    for layer in range(require(config.num_layers)):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        yield _Place(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",))
        yield _Place(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        yield _Place(
            f"{ours}.self_attention.linear_qkv.weight",
            tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv"),
            out=lambda tensor: split_qkv(config, tensor),
            back=lambda tensors: join_qkv(config, *tensors),
        )
        yield _Place(f"{ours}.self_attention.linear_proj.weight", (f"{theirs}.self_attn.o_proj.weight",))
        yield _Place(
            f"{ours}.mlp.linear_fc1.weight",
            (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight"),
            out=lambda tensor: tensor.chunk(2),
            back=lambda tensors: torch.cat(list(tensors)),
        )
        yield _Place(f"{ours}.mlp.linear_fc2.weight", (f"{theirs}.mlp.down_proj.weight",))
    yield _Place("decoder.final_layernorm.weight", ("model.norm.weight",))
