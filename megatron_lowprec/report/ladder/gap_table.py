"""The ladder as a table: gaps to the reference at each model size and budget, and their change over budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_lowprec.report.amounts import DASH, amount, number, signed
from megatron_lowprec.report.ladder.gap_points import Line, Point
from megatron_lowprec.report.statistics import t_quantile, welch_dof
from megatron_lowprec.report.tables import Table


def gap_table(lines: Sequence[Line], reference: str, confidence: float) -> Table | None:
    """A row for each model and recipe: the gap at each budget and the change from the smallest to the largest.

    Each is followed by the half width of its interval of ``confidence``. A change counts its two gaps as independent,
    with Welch's degrees of freedom.

    Returns:
        None unless a line has two budgets.
    """
    if all(len(line.points) < 2 for line in lines):
        return None
    budgets = sorted({_tokens(line, point) for line in lines for point in line.points})
    names = [amount(budget) for budget in budgets]
    if len({*names}) < len(names):  # rounded alike
        names = [f"{budget:,}" for budget in budgets]
    rows = []
    for line in sorted(lines, key=lambda line: line.parameters):
        points = {_tokens(line, point): point for point in line.points}
        row = {"parameters\nwithout embeddings": line.model, "recipe": line.label}
        for name, budget in zip(names, budgets, strict=True):
            point = points.get(budget)
            value, half_width = (math.nan, math.nan) if point is None else (point.gap, point.half_width)
            row |= _cells(f"gap to {reference}, {name} tokens", name, value, half_width)
        row |= _cells("change", "change", *_change(line.points[0], line.points[-1], confidence))
        rows.append(row)
    return Table.of(rows, {"recipe"})


def _tokens(line: Line, point: Point) -> int:
    return round(point.tokens_per_parameter * line.parameters)


def _change(first: Point, last: Point, confidence: float) -> tuple[float, float]:
    """Change of the gap and the half width of its interval; NaN if there is one point, or an error is unknown."""
    if first is last:
        return math.nan, math.nan
    error = math.hypot(first.error, last.error)
    if math.isnan(error):
        return last.gap - first.gap, math.nan
    dof = welch_dof([(point.error**2, point.dof) for point in (first, last)])
    return last.gap - first.gap, t_quantile(0.5 + confidence / 2, dof) * error


def _cells(heading: str, what: str, value: float, half_width: float) -> dict[str, str]:
    gap = DASH if math.isnan(value) else signed(value, 4)
    return {f"{heading}\nnats": gap, f"± of {what}\nnats": number(half_width, 4)}
