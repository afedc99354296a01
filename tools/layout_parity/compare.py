"""Compare the rows of all layouts with those of one process: the differences, and how large each may be."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lowprec.recipe.registry import get_recipe
from tools.layout_parity.layouts import LAYOUTS, Layout
from tools.layout_parity.plan import draws

Row = dict[str, Any]

FIRST = 1e-5
"""Largest difference of a first step's loss, in nats; later steps may differ by as much whatever the spread."""

SPREADS = 2.0
"""Largest later difference, in spreads. Among many cases some exceed the largest of a few differences by chance."""

SIGMAS = 3.0


@dataclass(frozen=True)
class Verdict:
    """The result of one comparison."""

    check: str
    model: str
    layout: str
    recipe: str
    precision: str
    ok: bool
    text: str = ""
    first: float = 0.0  # difference of the first step's loss; 0 for checks without losses
    later: float = 0.0  # the largest difference after the first step
    bound: float | None = None  # what ``later`` may be; None where nothing is claimed, for the reason ``why``
    why: str = ""
    others: int = 0  # other recipes whose one-process losses were put in the place of the layout's
    accepted: tuple[str, ...] = ()  # those of them that would hold as well

    @property
    def decides(self) -> bool:
        """Whether the comparison fails for every other recipe; losses of some recipes are too alike."""
        return not self.accepted

    def __str__(self) -> str:
        return f"{self.check}, {self.model} {self.layout}, {self.recipe}, {self.precision}: {self.text}"


def compare(rows: Sequence[Row]) -> list[Verdict]:
    """One verdict for each comparison that the rows allow."""
    good: dict[str, list[Row]] = defaultdict(list)
    one_process: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if "failed" not in row:
            good[row["check"]].append(row)
            if row["layout"] == "1":
                one_process[_run(row)].append(row)
    layouts = {(layout.model, layout.name): layout for layout in LAYOUTS}
    verdicts = [_verdict(row, False, row["failed"]) for row in rows if "failed" in row]
    for row in good["losses"]:
        layout, references = layouts.get((row["model"], row["layout"])), one_process[_run(row)]
        if layout is not None and "linears" not in row and any(one["check"] == "losses" for one in references):
            verdicts.append(_losses(row, layout, references, _others(row, one_process)))
    for row in good["operands"]:
        ok = row["compared"] > 0 and not row["wrong"]
        text = f"{row['compared']:,} operands of {row['layers']} linear layers"
        verdicts.append(_verdict(row, ok, f"differ: {row['wrong'][:4]}" if row["wrong"] else text))
    stock = {(row["model"], row["layout"]): row for row in good["losses"] if row.get("linears") == "stock"}
    for row in good["losses"]:
        other = stock.get((row["model"], row["layout"]))
        if row.get("linears") == "ours" and other is not None:
            verdicts.append(_same_losses({**row, "check": "stock"}, row["losses"], other["losses"]))
    verdicts += [_same_losses(row, row["whole"], row["resumed"]) for row in good["resume"]]
    verdicts += [_noise(row) for row in good["noise"]]
    # The checkpoints of both kinds of optimizer must hold the same weights.
    bases: dict[tuple[str, str], Row] = {}
    for row in good["base"]:
        if bases.setdefault((row["model"], row["precision"]), row)["weights"] != row["weights"]:
            verdicts.append(_verdict(row, False, "checkpoints hold different weights"))
    return verdicts


def exempt(layout: Layout, recipe: str) -> str:
    """Why later steps differ from one process's on this layout, even with exact sums; "" where they must agree."""
    if layout.regroups and get_recipe(recipe).quantized:
        return "experts see their tokens in other groups"
    if layout.data_parallel > 1 and draws(recipe):
        return "data-parallel ranks draw numbers of their own"
    if layout.data_parallel > 1 and "grad_output" in get_recipe(recipe).delayed_operands():
        return "the calibration sees gradients of another size at scale 1"
    return ""


def spread(rows: Iterable[Row], kind: str) -> tuple[float, float]:
    """Largest difference between any two one-process runs: at the first step, and after it."""
    runs = []
    for row in rows:
        if row["check"] == "losses":
            runs.append(_numbers(row["losses"]))
        elif row["check"] == "spread":
            runs += [_numbers(losses) for losses in row.get(kind, {}).values()]
    pairs = [_differences(one, other) for one, other in itertools.combinations(runs, 2)]
    return max((first for first, _ in pairs), default=0.0), max((later for _, later in pairs), default=0.0)


def _others(row: Row, one_process: Mapping[tuple[str, ...], Sequence[Row]]) -> dict[str, Sequence[str]]:
    """One-process losses of the other recipes, of a row's model and precision."""
    return {
        recipe: one["losses"]
        for (*case, recipe), rows in one_process.items()
        for one in rows
        if one["check"] == "losses" and (*case, recipe) != _run(row) and (*case,) == _run(row)[:2]
    }


def _losses(row: Row, layout: Layout, references: Sequence[Row], others: Mapping[str, Sequence[str]]) -> Verdict:
    recipe, precision = row["recipe"], row["precision"]
    reference = _numbers(next(one for one in references if one["check"] == "losses")["losses"])
    regrouped = layout.regroups and get_recipe(recipe).fprop.quantized
    why, first_bound, bound = exempt(layout, recipe), FIRST, None
    if precision == "fp64":
        bound = None if why else FIRST
        first_bound = float("inf") if regrouped else FIRST
    elif any(one["check"] == "spread" for one in references):
        reordered = layout.model != "gpt" or (draws(recipe) and layout.data_parallel > 1)
        first_spread, later_spread = spread(references, "reordered" if reordered else "moved")
        bound = max(FIRST, SPREADS * later_spread)
        if regrouped or precision == "bf16":
            first_bound = max(FIRST, SPREADS * first_spread)

    def holds(losses: Sequence[str]) -> bool:
        first, later = _differences(_numbers(losses), reference)
        return first <= first_bound and (bound is None or later <= bound)

    first, later = _differences(_numbers(row["losses"]), reference)
    allowed = "anything" if bound is None else f"{bound:.1e}"
    text = f"first {first:.1e}, later {later:.1e}, allowed {first_bound:.1e} and {allowed}"
    accepted = tuple(name for name, losses in others.items() if holds(losses))
    more = {"first": first, "later": later, "bound": bound, "why": why, "others": len(others), "accepted": accepted}
    return _verdict(row, holds(row["losses"]), text, **more)


def _same_losses(row: Row, one: Sequence[str], other: Sequence[str]) -> Verdict:
    return _verdict(row, one == other, f"{len(one)} losses, bit for bit" if one == other else f"{one} and {other}")


def _noise(row: Row) -> Verdict:
    if row["same_noise"]:
        return _verdict(row, row["same"], f"{row['entries']:,} rounding errors, same on both ranks: {row['same']}")
    ok = abs(row["z"]) < SIGMAS and not row["same"]
    return _verdict(row, ok, f"{row['entries']:,} rounding errors, correlation {row['z']:+.2f} sigma")


def _verdict(row: Row, ok: bool, text: str, **more: Any) -> Verdict:
    return Verdict(row["check"], row["model"], row["layout"], row["recipe"], row["precision"], ok, text, **more)


def _run(row: Row) -> tuple[str, ...]:
    return row["model"], row["precision"], row["recipe"]


def _numbers(losses: Sequence[str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses]


def _differences(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Of the first step, and the largest of the steps after it."""
    first, *later = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return first, max(later, default=0.0)
