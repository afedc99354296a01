"""Converts a GPT's weights to the tensors of a Hugging Face model, and back. Needs only torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.convert.hf_config import hf_form
from megatron_lowprec.training.convert.names import Weights
from megatron_lowprec.training.models.common.interface import TensorMap


def to_hf_weights(config: Config, weights: Weights, vocab_size: int, dtype: torch.dtype) -> Weights:
    """Tensors of model.safetensors in ``dtype``, without padding rows of the vocabulary.

    Raises:
        UserError: a missing weight, or one without a counterpart.
    """
    maps, rest, found = _tensor_maps(config), dict(weights), Weights()
    for entry in maps:
        if entry.ours not in rest:
            raise UserError(f"the checkpoint has no weight {entry.ours}: it is damaged or of another model")
        parts = entry.to_hf(rest.pop(entry.ours))
        found |= zip(entry.theirs, parts if entry.keeps_dtype else (part.to(dtype) for part in parts), strict=True)
    if rest:
        raise UserError(f"the checkpoint has weights that have no place: {', '.join(sorted(rest)[:5])}")
    for name in _of_vocabulary(maps):
        found[name] = found[name][:vocab_size]
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_hf_weights(config: Config, tensors: Mapping[str, torch.Tensor], rows: int) -> Weights:
    """The inverse of ``to_hf_weights``; the vocabulary is padded to ``rows`` by ``pad_rows``.

    Raises:
        UserError: a missing tensor, or one without a counterpart.
    """
    maps, known_name = _tensor_maps(config), hf_form(config).weights.known_name
    rest = {known: tensor for name, tensor in tensors.items() if (known := known_name(name)) is not None}
    if not config.untie_embeddings_and_output_weights:
        rest.pop("lm_head.weight", None)  # some files repeat the embedding
    for name in _of_vocabulary(maps) & rest.keys():
        rest[name] = pad_rows(rest[name], rows)
    found = Weights()
    for entry in maps:
        missing = [name for name in entry.theirs if name not in rest]
        if missing:
            raise UserError(f"the safetensors have no {missing[0]}, which config.json asks for")
        found[entry.ours] = entry.from_hf([rest.pop(name) for name in entry.theirs]).contiguous()
    if rest:
        raise UserError(f"the safetensors have tensors that have no place: {', '.join(sorted(rest)[:5])}")
    return found


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad a vocabulary to ``rows`` with copies of the last row.

    Zero rows would give logits of 0, which may be far above a trained model's: they would take all probability.
    """
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor[-1:].expand(missing, -1)]) if missing > 0 else tensor


def _tensor_maps(config: Config) -> list[TensorMap]:
    """The tensor map of every weight of the model, each once."""
    maps = [*hf_form(config).weights.tensor_maps(config)]
    if config.untie_embeddings_and_output_weights:
        maps.append(TensorMap("output_layer.weight", ("lm_head.weight",)))
    return maps


def _of_vocabulary(maps: Iterable[TensorMap]) -> set[str]:
    """Names of tensors with one row per token id."""
    ours = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {name for entry in maps if entry.ours in ours for name in entry.theirs}
