"""Lines of the ladder figure: gaps of a report's runs, and of published runs comparable to them.

Parameters exclude embeddings on both sides, as in the published file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lowprec.report.amounts import amount
from megatron_lowprec.report.curve import Status
from megatron_lowprec.report.groups import Group, non_embedding_parameters
from megatron_lowprec.report.published.ladder import PublishedRun, gap_ladder
from megatron_lowprec.report.statistics import Fit

_MOST_RECIPES = 8
SOURCE = "Quartet II"
_GROUPS = ("fixed_albert_tseng", "orig_albert_tseng")  # the source's runs of MXFP4 with a Hadamard transform


@dataclass(frozen=True)
class Point:
    """A gap to the reference in nats a token; ``half_width`` of its interval and standard ``error``, NaN if unknown."""

    tokens_per_parameter: float
    gap: float
    half_width: float = math.nan
    seeds: int = 1  # of the side that has fewer
    error: float = math.nan
    dof: float = 0.0  # of the error


@dataclass(frozen=True)
class Line:
    """Points of one recipe and model, by rising tokens."""

    label: str  # the recipe's, or the published group and rounding
    model: str  # its size, or the group's name if that tells more
    parameters: float  # without embeddings
    points: tuple[Point, ...]


def measured_lines(groups: Sequence[Group], fits: Mapping[str, Fit | None]) -> tuple[list[Line], list[str]]:
    """A line per recipe and model size, and the names of compared groups whose model size is unknown.

    Groups of equal size and tokens differ in something else: each group of such a size has lines of its own.
    """
    compared = {group.name: non_embedding_parameters(group.runs[0].options) for group in groups if group.compared}
    found = [group for group in groups if not math.isnan(compared.get(group.name, math.nan))]
    rungs = Counter((compared[group.name], group.tokens) for group in found)
    ambiguous = {size for (size, _), count in rungs.items() if count > 1}
    lines: dict[tuple[str, str, float], list[Point]] = {}
    for group in found:
        fit, size = fits[group.name], compared[group.name]
        assert fit is not None
        for label in group.compared:
            difference = fit.difference(label, group.reference)
            if math.isnan(difference.value):
                continue  # no shared seed
            error, half_width = (
                (math.nan, math.nan) if difference.error is None else (difference.error, difference.half_width)
            )
            model = group.name if size in ambiguous else amount(size)
            seeds = min(difference.counts)
            point = Point(group.tokens / size, difference.value, half_width, seeds, error, difference.dof)
            lines.setdefault((label, model, size), []).append(point)
    return [Line(*key, _rising(points)) for key, points in lines.items()], [
        name for name, size in compared.items() if math.isnan(size)
    ]


def best_measured(lines: Sequence[Line]) -> tuple[list[Line], list[str]]:
    """Lines of at most eight recipes, and the labels left out, so that the figure can be read.

    Those with the most budgets, then the most seeds, then the first.
    """
    ranks: dict[str, tuple[int, int]] = {}
    for line in lines:
        budgets, seeds = ranks.get(line.label, (0, 0))
        ranks[line.label] = budgets + len(line.points), max(seeds, *(point.seeds for point in line.points))
    kept = sorted(ranks, key=lambda label: ranks[label], reverse=True)[:_MOST_RECIPES]  # stable: equal ones in order
    return [line for line in lines if line.label in kept], [label for label in ranks if label not in kept]


def comparable_roundings(groups: Sequence[Group], labels: Collection[str]) -> set[bool]:
    """Whether rounding is stochastic, of each compared recipe among ``labels`` that the published runs resemble.

    These are MXFP4 operands after a Hadamard transform in dgrad and wgrad, an unquantized fprop, and a gap to an
    unquantized reference.
    """
    return {
        stochastic
        for group in groups
        for label in group.compared
        if label in labels
        and (plain := _recipe(group, group.reference))
        and not _operands(plain, "fprop", "dgrad", "wgrad")
        for stochastic, rounding in ((False, "nearest_even"), (True, "stochastic"))
        if _resembles(_recipe(group, label), rounding)
    }


def published_lines(runs: Sequence[PublishedRun], roundings: set[bool]) -> list[Line]:
    """A line per published group, model size and rounding, of the groups comparable to mxfp4_rht and mxfp4_rht_sr."""
    return [
        Line(
            f"{SOURCE} {group}, {'SR' if stochastic else 'nearest'}",
            amount(size),
            size,
            tuple(Point(*pair) for pair in pairs),
        )
        for group in _GROUPS
        for size in sorted({run.parameters for run in runs if run.group == group})
        for stochastic in sorted(roundings)
        if (pairs := gap_ladder(runs, size, group=group, bstochastic=str(stochastic)))
    ]


def _recipe(group: Group, label: str) -> Mapping[str, Any]:
    return group.of(label, Status.FINISHED)[0].recipe


def _resembles(recipe: Mapping[str, Any], rounding: str) -> bool:
    operands = _operands(recipe, "dgrad", "wgrad")
    mxfp4 = {"format": "e2m1", "rounding": rounding}
    return (
        len(operands) == 4
        and all(operand.items() >= mxfp4.items() and operand["scale"]["format"] == "e8m0" for operand in operands)
        and all(recipe[gemm]["hadamard"] for gemm in ("dgrad", "wgrad"))
        and not _operands(recipe, "fprop")
    )


def _operands(recipe: Mapping[str, Any], *gemms: str) -> list[Mapping[str, Any]]:
    """Quantized operands of these GEMMs of a resolved recipe; none for the empty recipe of a run without one."""
    found = (recipe.get(gemm, {}).get(name) for gemm in gemms for name in ("input", "weight", "grad_output"))
    return [operand for operand in found if operand]


def _rising(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(sorted(points, key=lambda point: point.tokens_per_parameter))
