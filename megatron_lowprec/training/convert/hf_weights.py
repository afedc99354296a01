"""A GPT's weights as the tensors of a Hugging Face model, and back. torch alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.convert.hf_config import hf_form
from megatron_lowprec.training.convert.names import Weights
from megatron_lowprec.training.models.common.interface import TensorMap


def to_hf_weights(config: Config, weights: Weights, vocab_size: int) -> Weights:
    """Tensors of model.safetensors; rows of the vocabulary that are padding are left out.

    Raises:
        UserError: a weight that is missing, or one that has no place.
    """
    maps, rest, found = _tensor_maps(config), dict(weights), Weights()
    for entry in maps:
        if entry.ours not in rest:
            raise UserError(f"the checkpoint has no weight {entry.ours}: it is damaged or of another model")
        found |= zip(entry.theirs, entry.to_hf(rest.pop(entry.ours)), strict=True)
    if rest:
        raise UserError(f"the checkpoint has weights that have no place: {', '.join(sorted(rest)[:5])}")
    for name in _of_vocabulary(maps):
        found[name] = found[name][:vocab_size]
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_hf_weights(config: Config, tensors: Mapping[str, torch.Tensor], rows: int) -> Weights:
    """The inverse of ``to_hf_weights``; the vocabulary is padded to ``rows``, as ``pad_rows`` says.

    Raises:
        UserError: a tensor that is missing, or one that has no place.
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
    """More rows for a vocabulary, copies of the last one.

    Rows of zeros would be logits of 0, which a trained model may reach nowhere else: they would take all probability.
    """
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor[-1:].expand(missing, -1)]) if missing > 0 else tensor


def _tensor_maps(config: Config) -> list[TensorMap]:
    """Where every weight of the model goes, each once."""
    maps = [*hf_form(config).weights.tensor_maps(config)]
    if config.untie_embeddings_and_output_weights:
        maps.append(TensorMap("output_layer.weight", ("lm_head.weight",)))
    return maps


def _of_vocabulary(maps: Iterable[TensorMap]) -> set[str]:
    """Tensors with a row for each token."""
    ours = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {name for entry in maps if entry.ours in ours for name in entry.theirs}
