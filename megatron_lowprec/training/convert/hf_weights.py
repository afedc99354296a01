"""Converts a GPT's weights to the tensors of a Hugging Face model, and back. Needs only torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.convert.hf_config import hf_form
from megatron_lowprec.training.convert.names import Weights, check_values
from megatron_lowprec.training.models.common.hugging_face import TensorMap


def to_hf_weights(config: Config, weights: Weights, vocab_size: int, dtype: torch.dtype) -> Weights:
    """Tensors of model.safetensors in ``dtype``, without padding rows of the vocabulary.

    Raises:
        UserError: a missing weight, one without a counterpart, or values that are not finite in ``dtype``.
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
    check_values(found, f"the checkpoint in {str(dtype).removeprefix('torch.')}")
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_hf_weights(config: Config, tensors: Mapping[str, torch.Tensor], vocab_size: int, rows: int) -> Weights:
    """The inverse of ``to_hf_weights``, in fp32; the vocabulary is padded to ``rows`` by ``pad_rows``.

    Args:
        vocab_size: rows of the vocabulary in the files.

    Raises:
        UserError: a missing tensor, one without a counterpart, of another dtype or size, or not finite.
    """
    maps, known_name = _tensor_maps(config), hf_form(config).known_name
    rest = {known: tensor for name, tensor in tensors.items() if (known := known_name(name)) is not None}
    check_values(rest, "the safetensors")
    rest = {name: tensor.float() for name, tensor in rest.items()}
    for name in _of_vocabulary(maps) & rest.keys():
        if len(rest[name]) != vocab_size:
            raise UserError(f"{name} has {len(rest[name])} rows, and config.json has vocab_size {vocab_size}")
    if not config.untie_embeddings_and_output_weights and "lm_head.weight" in rest:  # some files repeat the embedding
        head, (embedding,) = rest.pop("lm_head.weight"), _of_vocabulary(maps)
        if embedding in rest and not torch.equal(head, rest[embedding]):
            raise UserError(
                f"config.json has tie_word_embeddings true, but lm_head.weight is not {embedding}: set it to false"
            )
    for name in _of_vocabulary(maps) & rest.keys():
        rest[name] = pad_rows(rest[name], rows)
    found = Weights()
    for entry in maps:
        missing = [name for name in entry.theirs if name not in rest]
        if missing:
            raise UserError(f"the safetensors have no {missing[0]}, which config.json asks for")
        theirs = [rest.pop(name) for name in entry.theirs]
        try:
            found[entry.ours] = entry.from_hf(theirs).contiguous()
        except (RuntimeError, ValueError):  # torch's, of a view that is not possible
            raise UserError(
                f"{entry.theirs[0]} has shape {tuple(theirs[0].shape)}, which config.json's heads and sizes do not give"
            ) from None
    if rest:
        raise UserError(f"the safetensors have tensors that have no place: {', '.join(sorted(rest)[:5])}")
    return found


def is_bf16(config: Config, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a file has its weights in bf16, except those that have a dtype of their own."""
    theirs = {name for entry in _tensor_maps(config) if not entry.keeps_dtype for name in entry.theirs}
    known_name = hf_form(config).known_name
    return all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if known_name(name) in theirs)


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad a vocabulary to ``rows`` with copies of the last row.

    Zero rows would give logits of 0, which may be far above a trained model's: they would take all probability.
    """
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor[-1:].expand(missing, -1)]) if missing > 0 else tensor


def _tensor_maps(config: Config) -> list[TensorMap]:
    """The tensor map of every weight of the model, each once."""
    maps = [*hf_form(config).tensor_maps(config)]
    if config.untie_embeddings_and_output_weights:
        maps.append(TensorMap("output_layer.weight", ("lm_head.weight",)))
    return maps


def _of_vocabulary(maps: Iterable[TensorMap]) -> set[str]:
    """Names of tensors with one row per token id."""
    ours = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {name for entry in maps if entry.ours in ours for name in entry.theirs}
