"""Tables of quantization error: of operands, complete and in short for a terminal, and of GEMM outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megatron_lowprec.report.amounts import DASH, number, signed
from megatron_lowprec.report.operands import KINDS, OUTPUTS, Row, Snapshots, by_snr, full_name, median, not_finite
from megatron_lowprec.report.tables import Table


def of_every_operand(snapshots: Sequence[Snapshots]) -> Table:
    """A row for each operand of each GEMM that a recipe quantizes."""
    rows = []
    for each in snapshots:
        for kind in each.kinds:
            last = each.last(kind)
            row = {
                "recipe": each.label,
                "GEMM": kind[0],
                "operand": kind[1],
                "format": " / ".join(dict.fromkeys(str(row["format"]).upper() for row in last)) or DASH,
                "runs": f"{len(each.runs)}{'' if each.finished else ', not finished'}",
                "last snapshot\niteration": " to ".join(f"{end:,}" for end in sorted({min(each.ends), max(each.ends)})),
                "SNR\ndB": number(_median(last, "snr"), 1),
                "bias\n%": _percent(_median(last, "bias")),
                "underflow\n%": number(100 * _median(last, "underflow"), 2),
                "saturation\n%": number(100 * _median(last, "saturation"), 2),
                "worst layer": _worst(last, lambda row: str(row["linear"])),
            }
            rows.append(row)
    return Table.of(rows, {"recipe", "GEMM", "operand", "format", "worst layer"})


def in_short(snapshots: Sequence[Snapshots]) -> Table:
    """A row per recipe: the SNR of each operand, the other quantities for the worst operand."""
    kinds = [kind for kind in KINDS if any(kind in each.kinds for each in snapshots)]
    rows = []
    for each in snapshots:
        row = {
            "recipe": each.title,
            **{"\n".join(kind): number(_median(each.last(kind), "snr"), 1) for kind in kinds},
            "bias\n%, largest": _percent(_largest(each, "bias")),
            "underflow\n%, most": number(100 * _largest(each, "underflow"), 2),
            "saturation\n%, most": number(100 * _largest(each, "saturation"), 2),
            "worst layer": _worst(each.last(), full_name),
        }
        rows.append(row)
    return Table.of(rows, {"recipe", "worst layer"})


def of_outputs(snapshots: Sequence[Snapshots]) -> Table | None:
    """A row for each recipe and GEMM with the error of its output; None if no run recorded outputs."""
    rows = [
        {
            "recipe": each.title,
            "GEMM": kind[0],
            "SNR of the output\ndB": number(_median(last, "snr"), 1),
            "bias of the output\n%": _percent(_median(last, "bias")),
            "worst layer": _worst(last, lambda row: str(row["linear"])),
        }
        for each in snapshots
        for kind in OUTPUTS
        if (last := each.last(kind))
    ]
    return Table.of(rows, {"recipe", "GEMM", "worst layer"}) if rows else None


def _median(rows: Sequence[Row], quantity: str) -> float:
    """Median over finite operands."""
    return median(row[quantity] for row in rows if row["amax"] is not None)


def _largest(snapshots: Snapshots, quantity: str) -> float:
    """The operand median farthest from zero; NaN if there is none."""
    found = [_median(snapshots.last(kind), quantity) for kind in snapshots.kinds]
    return max((value for value in found if not math.isnan(value)), key=abs, default=math.nan)


def _worst(rows: Sequence[Row], named: Callable[[Row], str]) -> str:
    """The worst layer: non-finite ones first, then the lowest signal-to-noise ratio."""
    bad, ranked = not_finite(rows), by_snr(rows)
    if bad:
        return f"{named(bad[0])}, not finite ({len(bad)} of {len(rows)})"
    return f"{named(ranked[0])}, {ranked[0]['snr']:.1f} dB" if ranked else DASH


def _percent(share: float) -> str:
    return DASH if math.isnan(share) else signed(100 * share, 2)
