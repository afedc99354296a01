"""Verdicts as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lowprec.text_tables import markdown_table
from tools.layout_parity.compare import FIRST, SPREADS, Verdict

_INTRODUCTION = """Every layout starts from one checkpoint, written by a single process after {base} steps, and takes
{steps} steps on the same samples ({batch} an iteration in microbatches of {microbatch}, {sequence} tokens each); `gpt`
has 4 layers, hidden 256. A number is the difference to one process's loss, in nats; **bold** is more than allowed.
"""
_CLAIM = """Codes and scales carry the claim: {operands} comparisons are of bits, given the same operand. Losses show
less. The last number of a loss cell, such as 13/16, is its power: how many of the other recipes it refuses, were their
losses on one process in the place of its own. Only cells that refuse all of them count.
"""
_FP64 = """## Exact sums (fp64)

The model computes in fp64, so the order of sums has no effect; quantizers see fp32 as always. First step / largest
difference after it, power. Allowed is {first:.0e} both times, except where later steps differ by design: (n)
data-parallel ranks draw numbers of their own, (c) the calibration of delayed scaling sees gradients of another size at
scale 1, (g) experts see their tokens in other groups.
"""
_SPREAD = """## {precision} compute

First step / largest difference after it, and in brackets its share of the spread: the largest difference between any
two of {runs} one-process runs, of which {moved} began with embedding weights moved by one unit in the last place (seeds
{seeds}). Marked n and g: these also took each iteration's samples in another order. If a layout were one more such run,
one case in {chance} would be above 1 by chance; of these {cases}, {above} are. The last number is the power.
Allowed are {first_rule}two spreads, or {first:.0e}{after}.
"""
_FLIPPED = f"""Sums in another order differ in their last bits, which can move a number across the middle between two
codes; a single code can move a loss by more than {FIRST:.0e}, in the first step already. The table of exact sums (fp64)
shows the differences without that effect.
"""
_TITLES = {
    "operands": "## Given the same operand: codes and scales, bit for bit",
    "stock": "## Recipe bf16 and Megatron-core's own layers (`--no-lowprec-linears`), bf16, no fused accumulation",
    "resume": "## Stopped and resumed, dropout on, bf16",
    "noise": "## Rounding noise of two data-parallel ranks",
}
_MARKS = {"data-parallel": " n", "the calibration": " c", "experts see": " g"}


def render(
    title: str,
    verdicts: Sequence[Verdict],
    facts: dict[str, object],
    conditions: str,
    notes: Sequence[str],
    missing: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        missing: checks without a result.
        facts: base, steps, batch, microbatch, sequence and seeds of the introductions.
    """
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    operands = sum(verdict.check == "operands" for verdict in verdicts)
    parts = [f"# {title}", conditions, f"**{in_short(verdicts, missing)}**", _INTRODUCTION.format(**facts)]
    parts += [_CLAIM.format(operands=operands)] if operands else []
    losses = [verdict for verdict in verdicts if verdict.check == "losses"]
    for precision in dict.fromkeys(v.precision for v in losses):
        parts += _losses([v for v in losses if v.precision == precision], precision, facts)
    for check, heading in _TITLES.items():
        found = [verdict for verdict in verdicts if verdict.check == check]
        parts += [f"{heading}\n\n{_list(found)}"] if found else []
    flipped = any(v.precision != "fp64" and v.check == "losses" for v in wrong)
    for heading, lines, comment in (
        ("More than allowed", wrong, _FLIPPED if flipped else ""),
        ("No result", missing, ""),
        ("Notes", notes, ""),
    ):
        if lines:
            parts.append("\n".join([f"## {heading}\n", *(f"- {line}" for line in lines)]))
            parts += [comment] if comment else []
    return "\n\n".join(part.strip() for part in parts) + "\n"


def in_short(verdicts: Sequence[Verdict], missing: Sequence[str] = ()) -> str:
    """Sentences with the number of comparisons that decide, of those that do not, and of those that have no result."""
    parts = []
    for found, what in (
        ([verdict for verdict in verdicts if verdict.decides], ""),
        ([verdict for verdict in verdicts if not verdict.decides], " that would accept another recipe's losses"),
    ):
        if found:
            wrong = sum(not verdict.ok for verdict in found)
            parts.append(f"{len(found)} cases{what}" + (f", {wrong} more than allowed." if wrong else " hold."))
    return " ".join([*parts, *([f"{len(missing)} checks have no result."] if missing else [])])


def _losses(verdicts: Sequence[Verdict], precision: str, facts: dict[str, object]) -> list[str]:
    """The introduction of a precision and a table for each model."""
    seeds = list(facts["seeds"])  # type: ignore[call-overload]
    if precision == "fp64":
        parts = [_FP64.format(first=FIRST)]
    else:
        text = _SPREAD.format(
            precision=precision,
            runs=len(seeds) + 1,
            moved=len(seeds),
            seeds=", ".join(map(str, seeds)),
            chance=len(seeds) * (len(seeds) + 1) // 2 + 1,
            cases=len(verdicts),
            above=sum(verdict.bound is not None and _spreads(verdict) > 1 for verdict in verdicts),
            first=FIRST,
            first_rule="" if precision == "bf16" else f"{FIRST:.0e} for the first step (marked g: two spreads), and ",
            after="" if precision == "bf16" else ", after it",
        )
        parts = [text]
    for model in dict.fromkeys(v.model for v in verdicts):
        mine = {(v.recipe, v.layout): v for v in verdicts if v.model == model}
        layouts = list(dict.fromkeys(layout for _, layout in mine))
        rows = [
            [f"`{recipe}`", *(_cell(mine.get((recipe, layout))) for layout in layouts)]
            for recipe in dict.fromkeys(recipe for recipe, _ in mine)
        ]
        parts.append("\n".join(markdown_table([model, *layouts], rows, left=[model])))
    return parts


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    mark = next((mark for start, mark in _MARKS.items() if verdict.why.startswith(start)), "")
    part = f" ({_spreads(verdict):.2f})" if verdict.bound and verdict.precision != "fp64" else ""
    first, later = (f"{value:.0e}".replace("e-0", "e-") if value else "0" for value in (verdict.first, verdict.later))
    power = f", {verdict.others - len(verdict.accepted)}/{verdict.others}" if verdict.others else ""
    text = f"{first} / {later}{part}{mark}{power}"
    return text if verdict.ok else f"**{text}**"


def _spreads(verdict: Verdict) -> float:
    """A later difference in spreads; where nothing is claimed, in halves of 1e-5."""
    return SPREADS * verdict.later / (verdict.bound or FIRST)


def _list(verdicts: Sequence[Verdict]) -> str:
    """One line for the verdicts of a layout that hold, and one for each that does not."""
    lines = []
    for case in dict.fromkeys((v.model, v.layout, v.precision) for v in verdicts):
        where = "{} {}, {}".format(*case)
        mine = [v for v in verdicts if (v.model, v.layout, v.precision) == case]
        held = [v for v in mine if v.ok]
        if len({v.text for v in held}) == 1:
            lines.append(f"- {where}: {f'{len(held)} recipes: ' if len(held) > 1 else ''}{held[0].text}")
        elif held:
            lines.append(f"- {where}: " + "; ".join(f"`{v.recipe}` {v.text}" for v in held))
        lines += [f"- **{where}, `{v.recipe}`: {v.text}**" for v in mine if not v.ok]
    return "\n".join(lines)
