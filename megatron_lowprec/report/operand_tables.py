"""Tables of how well operands were represented: all of it for the page, the worst of it for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megatron_lowprec.report.amounts import DASH, number, signed
from megatron_lowprec.report.operands import KINDS, Row, Snapshots, by_snr, full_name, median, not_finite
from megatron_lowprec.report.tables import Table


def of_every_operand(snapshots: Sequence[Snapshots]) -> Table:
    """A row for each operand of each GEMM that a recipe quantizes."""
    columns = (
        "recipe",
        "GEMM",
        "operand",
        "format",
        "runs",
        "last snapshot\niteration",
        "SNR\ndB",
        "bias\n%",
        "underflow\n%",
        "saturation\n%",
        "worst layer",
    )
    rows = []
    for each in snapshots:
        runs = f"{len(each.runs)}{'' if each.finished else ', not finished'}"
        ends = " to ".join(f"{end:,}" for end in dict.fromkeys((min(each.ends), max(each.ends))))
        for kind in each.kinds:
            last = each.last(kind)
            formats = " / ".join(dict.fromkeys(str(row["format"]).upper() for row in last)) or DASH
            numbers = (
                number(_median(last, "snr"), 1),
                _percent(_median(last, "bias")),
                number(100 * _median(last, "underflow"), 2),
                number(100 * _median(last, "saturation"), 2),
            )
            rows.append((each.label, *kind, formats, runs, ends, *numbers, _worst(last, _linear)))
    return Table(columns, tuple(rows), frozenset({"recipe", "GEMM", "operand", "format", "worst layer"}))


def in_short(snapshots: Sequence[Snapshots]) -> Table:
    """A row a recipe: the SNR of each operand, the other numbers of the operand where they are worst."""
    kinds = [kind for kind in KINDS if any(kind in each.kinds for each in snapshots)]
    columns = (
        "recipe",
        *(f"{gemm}\n{operand}" for gemm, operand in kinds),
        "bias\n%, largest",
        "underflow\n%, most",
        "saturation\n%, most",
        "worst layer",
    )
    rows = []
    for each in snapshots:
        cells = [number(_median(each.last(kind), "snr"), 1) for kind in kinds]
        cells.append(_percent(_largest(each, "bias")))
        cells += [number(100 * _largest(each, quantity), 2) for quantity in ("underflow", "saturation")]
        rows.append((each.title, *cells, _worst(each.last(), full_name)))
    return Table(columns, tuple(rows), frozenset({"recipe", "worst layer"}))


def _median(rows: Sequence[Row], quantity: str) -> float:
    """Of the operands that are finite."""
    return median(row[quantity] for row in rows if row["amax"] is not None)


def _largest(snapshots: Snapshots, quantity: str) -> float:
    """The median of the operand where it is farthest from zero; NaN where none has one."""
    found = [_median(snapshots.last(kind), quantity) for kind in snapshots.kinds]
    return max((value for value in found if not math.isnan(value)), key=abs, default=math.nan)


def _worst(rows: Sequence[Row], named: Callable[[Row], str]) -> str:
    """What is not finite comes first, then the lowest signal-to-noise ratio."""
    bad, ranked = not_finite(rows), by_snr(rows)
    if bad:
        return f"{named(bad[0])}, not finite ({len(bad)} of {len(rows)})"
    return f"{named(ranked[0])}, {ranked[0]['snr']:.1f} dB" if ranked else DASH


def _linear(row: Row) -> str:
    return str(row["linear"])


def _percent(share: float) -> str:
    return DASH if math.isnan(share) else signed(100 * share, 2)
