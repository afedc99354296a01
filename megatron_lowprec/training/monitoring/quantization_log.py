"""Output of quantization errors: one row per operand, TensorBoard scalars, and a log line about the worst."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from megatron_lowprec.mcore.debug.operand_probe import OperandId
from megatron_lowprec.quantization.error_stats import QuantizationError

Operands = Sequence[tuple[OperandId, QuantizationError]]
"""Sorted by operand id, as ``OperandProbe.found`` returns them."""


def quantization_row(iteration: int, place: OperandId, fidelity: QuantizationError) -> dict[str, Any]:
    """A line of quantization.jsonl with the fields of ``QuantizationError``; a non-finite amax is null."""
    named = {"linear": place.linear, "gemm": place.gemm, "operand": place.operand, "format": place.format}
    amax = fidelity.amax if math.isfinite(fidelity.amax) else None
    return {"iteration": iteration, **named, **asdict(fidelity), "amax": amax}


def quantization_scalars(operands: Operands) -> dict[str, float]:
    """For each operand of each GEMM, over all layers: the lowest and the mean SNR, the largest shares and bias."""
    found: dict[str, float] = {"quantization/operands not finite": float(len(_not_finite(operands)))}
    for kind in dict.fromkeys((place.order, place.gemm, place.operand) for place, _ in operands):
        of_kind = [fidelity for place, fidelity in operands if (place.order, place.gemm, place.operand) == kind]
        name = f"quantization/{kind[1]} {kind[2]}"
        snrs = [fidelity.snr for fidelity in of_kind if fidelity.snr is not None]
        if snrs:
            found[f"{name} SNR lowest"], found[f"{name} SNR mean"] = min(snrs), mean(snrs)
        found[f"{name} underflow"] = max(fidelity.underflow for fidelity in of_kind)
        found[f"{name} saturation"] = max(fidelity.saturation for fidelity in of_kind)
        biases = [abs(fidelity.bias) for fidelity in of_kind if fidelity.bias is not None]
        if biases:
            found[f"{name} bias"] = max(biases)
    return found


def quantization_line(iteration: int, operands: Operands) -> str:
    """Log line with non-finite operands, the lowest SNR, most underflow and most saturation, each with its operand."""
    if not operands:
        return f" quantization at iteration {iteration} | no operand is quantized |"
    bad = _not_finite(operands)
    parts = [f"not finite: {len(bad)} of {len(operands)} operands, first {_name(bad[0])}"] if bad else []
    snrs = [(fidelity.snr, place) for place, fidelity in operands if fidelity.snr is not None]
    if snrs:
        snr, place = min(snrs)
        parts.append(f"lowest SNR: {snr:.1f} dB, {_name(place)}")
    for name in ("underflow", "saturation"):
        less, place = min((-getattr(fidelity, name), place) for place, fidelity in operands)
        parts.append(f"most {name}: {-less:.2%}, {_name(place)}" if less else f"no {name}")
    return f" quantization at iteration {iteration} | {' | '.join(parts)} |"


def _not_finite(operands: Operands) -> list[OperandId]:
    return [place for place, fidelity in operands if not math.isfinite(fidelity.amax)]


def _name(place: OperandId) -> str:
    return f"{place.linear} {place.gemm} {place.operand}"
