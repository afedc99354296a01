"""Output of quantization errors: one row per operand and GEMM output, TensorBoard scalars, log lines and alarms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from megatron_lowprec.mcore.debug.operand_probe import OperandId
from megatron_lowprec.quantization.error_stats import QuantizationError

Operands = Sequence[tuple[OperandId, QuantizationError]]
"""Sorted by operand id, as ``OperandProbe.found`` returns them."""

CRITICAL_RATIO = math.sqrt(3)
"""Ratio of a gradient's norm to that of its quantization noise below which arXiv 2505.19115 finds training impaired."""


def quantization_row(iteration: int, place: OperandId, fidelity: QuantizationError) -> dict[str, Any]:
    """A line of quantization.jsonl with the fields of ``QuantizationError``; a non-finite amax is null.

    It has a ``recipe`` if that is not the run's, and a weight gradient ``gradient_to_noise``.
    """
    named = {"linear": place.linear, "gemm": place.gemm, "operand": place.operand, "format": place.format}
    if place.recipe:
        named["recipe"] = place.recipe
    amax = fidelity.amax if math.isfinite(fidelity.amax) else None
    row = {"iteration": iteration, **named, **vars(fidelity), "amax": amax}
    if _is_weight_gradient(place):
        row["gradient_to_noise"] = _ratio(fidelity)
    return row


def quantization_scalars(operands: Operands) -> dict[str, float]:
    """For each operand and output of each GEMM, over all layers: the lowest and mean SNR, the largest shares and bias.

    Also the largest spread of an operand's block scales in binades, and the lowest gradient-to-noise ratio.
    """
    found: dict[str, float] = {"quantization/operands not finite": float(len(_not_finite(_own_operands(operands))))}
    kinds: dict[tuple[str, int, str, str], list[QuantizationError]] = {}
    for place, fidelity in operands:
        kinds.setdefault((place.recipe, place.order, place.gemm, place.operand), []).append(fidelity)
    for (recipe, _, gemm, operand), of_kind in kinds.items():
        name = f"quantization{' ' if recipe else ''}{recipe}/{gemm} {operand}"
        snrs = [fidelity.snr for fidelity in of_kind if fidelity.snr is not None]
        if snrs:
            found[f"{name} SNR lowest"], found[f"{name} SNR mean"] = min(snrs), mean(snrs)
        biases = [abs(fidelity.bias) for fidelity in of_kind if fidelity.bias is not None]
        if biases:
            found[f"{name} bias"] = max(biases)
        if operand == "output":
            continue
        found[f"{name} underflow"] = max(fidelity.underflow for fidelity in of_kind)
        found[f"{name} saturation"] = max(fidelity.saturation for fidelity in of_kind)
        spreads = [
            math.log2(fidelity.scale_inv_max / fidelity.scale_inv_min)
            for fidelity in of_kind
            if fidelity.scale_inv_max and fidelity.scale_inv_min
        ]
        if spreads:
            found[f"{name} scale spread"] = max(spreads)
    ratios = [ratio for _, ratio in gradient_to_noise(operands)]
    if ratios:
        found["quantization/gradient to noise lowest"] = min(ratios)
    return found


def quantization_lines(iteration: int, operands: Operands) -> Iterator[str]:
    """A log line for the run's recipe, and one for each other recipe."""
    yield _line(f" quantization at iteration {iteration} |", _own_operands(operands))
    for recipe in dict.fromkeys(place.recipe for place, _ in operands if place.recipe):
        of_recipe = [(place, fidelity) for place, fidelity in operands if place.recipe == recipe]
        yield _line(f" quantization at iteration {iteration} by {recipe} |", of_recipe)


def gradient_to_noise(operands: Operands) -> list[tuple[str, float]]:
    """Linear layer -> norm of its weight gradient over that of the gradient's quantization error, where defined."""
    return [
        (place.linear, ratio)
        for place, fidelity in operands
        if _is_weight_gradient(place) and (ratio := _ratio(fidelity)) is not None
    ]


def _own_operands(operands: Operands) -> Operands:
    """Operands that the run's own recipe quantized, without outputs."""
    return [(place, fidelity) for place, fidelity in operands if not place.recipe and place.operand != "output"]


def _line(start: str, operands: Operands) -> str:
    """Non-finite operands, the lowest SNR, most underflow and most saturation, each with its operand."""
    if not operands:
        return f"{start} no operand is quantized |"
    bad = _not_finite(operands)
    parts = [f"not finite: {len(bad)} of {len(operands)} operands, first {_name(bad[0])}"] if bad else []
    snrs = [(fidelity.snr, place) for place, fidelity in operands if fidelity.snr is not None]
    if snrs:
        snr, place = min(snrs)
        parts.append(f"lowest SNR: {snr:.1f} dB, {_name(place)}")
    for name in ("underflow", "saturation"):
        less, place = min((-getattr(fidelity, name), place) for place, fidelity in operands)
        parts.append(f"most {name}: {-less:.2%}, {_name(place)}" if less else f"no {name}")
    return f"{start} {' | '.join(parts)} |"


def _not_finite(operands: Operands) -> list[OperandId]:
    return [place for place, fidelity in operands if not math.isfinite(fidelity.amax)]


def _name(place: OperandId) -> str:
    return f"{place.linear} {place.gemm} {place.operand}"


def _is_weight_gradient(place: OperandId) -> bool:
    return (place.gemm, place.operand, place.recipe) == ("wgrad", "output", "")


def _ratio(fidelity: QuantizationError) -> float | None:
    return None if fidelity.snr is None else 10.0 ** (fidelity.snr / 20)
