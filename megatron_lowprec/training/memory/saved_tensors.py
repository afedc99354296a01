"""Bytes of a layer's saved tensors under a recipe on a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.recipe.coverage import ACTIVATION_BLOCK
from megatron_lowprec.recipe.fp8_dispatch import scales_of_token
from megatron_lowprec.recipe.quant_spec import QuantSpec
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.memory.layout import Execution
from megatron_lowprec.training.models.common.rank_sizes import width_of
from megatron_lowprec.training.models.common.saved_tensor import SavedTensor


def saved_bytes(tensors: Iterable[SavedTensor], config: Config, runs: Execution, layer: int) -> dict[str, float]:
    """Bytes of the tensors of one layer, by term."""
    found: dict[str, float] = defaultdict(float)
    for tensor in tensors:
        for name, size in _terms(tensor, config, runs, layer):
            found[name] += size
    return dict(found)


def _terms(tensor: SavedTensor, config: Config, runs: Execution, layer: int) -> Iterator[tuple[str, float]]:
    """Names and bytes: none of a tensor that is not saved, two of one whose FP8 codes are saved beside it."""
    entries, form = tensor.entries, _format(tensor, runs)
    if form != "none":  # with one E8M0 byte of scale for each block
        yield tensor.in_format.format(form.upper()), entries * (FORMATS[form].bits / 8 + 1 / ACTIVATION_BLOCK)
        return
    source = tensor.computed_from
    if source is not None and (runs.recomputes_gelu(config) or _format(source, runs) != "none"):
        return
    if tensor.unfused and runs.fused:
        return
    size, linear = entries * (tensor.width or width_of(config)), tensor.input_of
    if linear is None:
        yield tensor.name, size
    elif tensor.behind_norm and runs.computes_again(config, layer, linear):
        yield tensor.name, 0.0
    elif tensor.dispatched:
        yield tensor.name, _dispatched_bytes(entries, config, runs.linear(config, layer, linear).fprop.input)
    elif not (of_codes := runs.saved_codes(config, layer, linear)):
        yield tensor.name, size
    elif not tensor.also_output:
        yield tensor.name, entries * of_codes  # codes in its place
    else:
        yield tensor.name, size
        if not runs.casts_again(config):
            form = "FP8" if of_codes == 1 else "FP4"
            yield f"{form} codes of {linear.rpartition('.')[2]}'s input", entries * of_codes


def _format(tensor: SavedTensor, runs: Execution) -> str:
    """The recipe's format of a saved activation, or "none"."""
    return "none" if tensor.activation is None else runs.recipe.activations.formats[tensor.activation]


def _dispatched_bytes(entries: float, config: Config, spec: QuantSpec | None) -> float:
    """Bytes of tokens as an expert saves them: codes and scales that arrived, values of a format without FP8 codes."""
    hidden, width = config.shape.hidden_size, width_of(config)
    if spec is None:
        return entries * width
    in_fp8 = spec.format in ("e4m3", "e5m2")
    scale = 4 if spec.scale_format == "fp32" else 1
    return entries / hidden * (hidden * (1 if in_fp8 else width) + scales_of_token(spec, hidden) * scale)
