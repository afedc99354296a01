"""From rows to verdicts: what every layout's run differs by from one process's, and how much it may."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lowprec.recipe.registry import get_recipe
from tools.layout_parity.layouts import LAYOUTS, Layout
from tools.layout_parity.plan import draws

Row = dict[str, Any]

FIRST = 1e-5
"""Nats that a first step's loss may differ by, and later ones whatever the spread."""

SPREADS = 2.0
"""Of this many spreads a later difference may be: of many cells some exceed the largest of a few differences by chance.
"""

SIGMAS = 3.0


@dataclass(frozen=True)
class Verdict:
    """One thing that was looked at.

    Attributes:
        first: difference of the first step's loss; of 0 in what has no losses.
        later: largest difference of the steps after it.
        bound: what ``later`` may be; None where nothing is claimed, and ``why`` says why.
    """

    check: str
    model: str
    layout: str
    recipe: str
    precision: str
    ok: bool
    says: str = ""
    first: float = 0.0
    first_bound: float = FIRST
    later: float = 0.0
    bound: float | None = None
    why: str = ""


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """All verdicts that the rows so far allow."""
    found = [_failed(row) for row in rows if "failed" in row]
    good = [row for row in rows if "failed" not in row]
    found += _losses(good)
    found += [_operands(row) for row in good if row["check"] == "operands"]
    found += _stock(good)
    found += [_resume(row) for row in good if row["check"] == "resume"]
    found += [_noise(row) for row in good if row["check"] == "noise"]
    found += _bases(good)
    return found


def exempt(layout: Layout, recipe: str) -> str:
    """Why a recipe's later steps are not one process's on a layout, even with exact sums; "" where they must be."""
    if layout.regroups and get_recipe(recipe).quantized:
        return "experts see their tokens in other groups"
    if layout.data_parallel > 1 and draws(recipe):
        return "data-parallel ranks draw numbers of their own"
    if layout.data_parallel > 1 and "grad_output" in get_recipe(recipe).delayed_operands():
        return "the calibration sees gradients of another size at scale 1"
    return ""


def spread(rows: Iterable[Row], kind: str) -> tuple[float, float]:
    """Largest difference of any two one-process runs: at the first step, and after it."""
    found = [_numbers(row["losses"]) for row in rows if row["check"] == "losses"]
    for row in rows:
        if row["check"] == "spread":
            found += [_numbers(losses) for losses in row.get(kind, {}).values()]
    first = later = 0.0
    for one, other in itertools.combinations(found, 2):
        first = max(first, abs(one[0] - other[0]))
        later = max(later, _later(one, other))
    return first, later


def _losses(rows: Sequence[Row]) -> list[Verdict]:
    layouts = {(layout.model, layout.name): layout for layout in LAYOUTS}
    found = []
    for row in rows:
        layout = layouts.get((row["model"], row["layout"]))
        if row["check"] != "losses" or layout is None or "linears" in row:
            continue
        same = [
            other
            for other in rows
            if other["layout"] == "1"
            and (other["model"], other["precision"], other["recipe"]) == (row["model"], row["precision"], row["recipe"])
        ]
        references = [other for other in same if other["check"] == "losses"]
        if not references:
            continue
        mine, reference = _numbers(row["losses"]), _numbers(references[0]["losses"])
        first, later, why = abs(mine[0] - reference[0]), _later(mine, reference), exempt(layout, row["recipe"])
        regrouped = layout.regroups and get_recipe(row["recipe"]).fprop.quantized
        first_bound, bound, kind = FIRST, None, "moved"
        if layout.model != "gpt" or (draws(row["recipe"]) and layout.data_parallel > 1):
            kind = "reordered"
        if row["precision"] == "fp64":
            bound = None if why else FIRST
            first_bound = float("inf") if regrouped else FIRST
        elif any(other["check"] == "spread" for other in same):
            first_spread, later_spread = spread(same, kind)
            bound = max(FIRST, SPREADS * later_spread)
            if regrouped or row["precision"] == "bf16":
                first_bound = max(FIRST, SPREADS * first_spread)
        ok = first <= first_bound and (bound is None or later <= bound)
        found.append(
            Verdict(
                "losses",
                row["model"],
                row["layout"],
                row["recipe"],
                row["precision"],
                ok,
                f"first {first:.1e}, later {later:.1e}, allowed {first_bound:.1e} and "
                + (f"{bound:.1e}" if bound is not None else "anything"),
                first,
                first_bound,
                later,
                bound,
                why,
            )
        )
    return found


def _operands(row: Row) -> Verdict:
    wrong = row["wrong"]
    says = f"{row['compared']:,} operands of {row['layers']} linear layers" if not wrong else f"differ: {wrong[:4]}"
    return _of(row, not wrong and row["compared"] > 0, says)


def _stock(rows: Sequence[Row]) -> list[Verdict]:
    stock = {(row["model"], row["layout"]): row for row in rows if row.get("linears") == "stock"}
    found = []
    for row in rows:
        other = stock.get((row["model"], row["layout"]))
        if row.get("linears") == "ours" and other is not None:
            same = row["losses"] == other["losses"]
            says = f"{len(row['losses'])} losses, bit for bit" if same else f"{row['losses']} and {other['losses']}"
            found.append(_of({**row, "check": "stock"}, same, says))
    return found


def _resume(row: Row) -> Verdict:
    same = row["whole"] == row["resumed"]
    says = f"{len(row['whole'])} losses, bit for bit" if same else f"{row['whole']} and {row['resumed']}"
    return _of(row, same, says)


def _noise(row: Row) -> Verdict:
    if row["same_noise"]:
        return _of(row, row["same"], f"{row['entries']:,} rounding errors, same on both ranks: {row['same']}")
    ok = abs(row["z"]) < SIGMAS and not row["same"]
    return _of(row, ok, f"{row['entries']:,} rounding errors, correlation {row['z']:+.2f} sigma")


def _bases(rows: Sequence[Row]) -> list[Verdict]:
    """The checkpoints of both kinds of optimizer must hold the same weights."""
    found = []
    bases: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if row["check"] == "base":
            bases.setdefault((row["model"], row["precision"]), set()).add(row["weights"])
    for (model, precision), weights in bases.items():
        if len(weights) > 1:
            found.append(Verdict("base", model, "1", "bf16", precision, False, "checkpoints hold different weights"))
    return found


def _failed(row: Row) -> Verdict:
    return _of(row, False, row["failed"])


def _of(row: Row, ok: bool, says: str) -> Verdict:
    return Verdict(row["check"], row["model"], row["layout"], row["recipe"], row["precision"], ok, says)


def _numbers(losses: Sequence[str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses]


def _later(one: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(one[1:], other[1:], strict=True)), default=0.0)
