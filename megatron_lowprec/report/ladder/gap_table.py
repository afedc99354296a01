"""The ladder as a table: gaps to the reference at each model size and budget, and their change over budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron_lowprec.report.amounts import DASH, amount, signed
from megatron_lowprec.report.ladder.gap_points import Line, Point
from megatron_lowprec.report.statistics import t_quantile
from megatron_lowprec.report.tables import Table


def gap_table(lines: Sequence[Line], reference: str, confidence: float) -> Table | None:
    """A row for each model and recipe, a column for each budget, and the change from the smallest to the largest.

    None unless a line has two budgets. Half widths are of intervals of ``confidence``. A change counts its two gaps as
    independent (runs of different lengths share seeds, but not their noise), with Welch's degrees of freedom.
    """
    if all(len(line.points) < 2 for line in lines):
        return None
    budgets = sorted({_tokens(line, point) for line in lines for point in line.points})
    rows = []
    for line in sorted(lines, key=lambda line: line.parameters):
        points = {_tokens(line, point): point for point in line.points}
        first, last = line.points[0], line.points[-1]
        change = _change(first, last, confidence) if len(points) > 1 else DASH
        gaps = {_heading(budget, reference): _gap(points, budget) for budget in budgets}
        named = {"parameters\nwithout embeddings": line.model, "recipe": line.label}
        rows.append({**named, **gaps, "change\nnats": change})
    return Table.of(rows, {"recipe"})


def _tokens(line: Line, point: Point) -> int:
    return round(point.tokens_per_parameter * line.parameters)


def _heading(tokens: int, reference: str) -> str:
    return f"gap to {reference}, {amount(tokens)} tokens\nnats"


def _gap(points: Mapping[int, Point], budget: int) -> str:
    return _with_half_width(points[budget].gap, points[budget].half_width) if budget in points else DASH


def _change(first: Point, last: Point, confidence: float) -> str:
    parts = [(point.error**2, point.dof) for point in (first, last)]
    variance = sum(part for part, _ in parts)
    if math.isnan(variance):
        return _with_half_width(last.gap - first.gap, math.nan)
    share = sum(part**2 / dof for part, dof in parts)
    dof = variance**2 / share if share else math.inf
    return _with_half_width(last.gap - first.gap, t_quantile(0.5 + confidence / 2, dof) * math.sqrt(variance))


def _with_half_width(value: float, half_width: float) -> str:
    return signed(value, 4) + (", interval unknown" if math.isnan(half_width) else f" ± {half_width:.4f}")
