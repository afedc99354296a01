"""Verdicts as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lowprec.text_tables import markdown_table
from tools.layout_parity.judge import FIRST, SPREADS, Verdict

_INTRODUCTION = """Every layout starts from one checkpoint, written by a single process after {base} steps, and takes
{steps} steps on the same samples ({batch} an iteration in microbatches of {microbatch}, {sequence} tokens each); `gpt`
has 4 layers, hidden 256. A number is the difference to one process's loss, in nats; **bold** is more than allowed.
"""
_FP64 = """## Exact sums (fp64)

What follows from the layout and not from the order of sums: the model computes in fp64, quantizers see fp32 as always.
First step / largest difference after it. Allowed is {first:.0e} both times, but where the table says why later steps
are others: (n) data-parallel ranks draw numbers of their own, (c) the calibration of delayed scaling sees gradients
of another size at scale 1, (g) experts see their tokens in other groups.
"""
_SPREAD = """## {precision} compute

First step / largest difference after it, and in brackets what part this is of the spread: the largest difference
between any two of {runs} one-process runs, of which {moved} began with embedding weights that were moved by one unit in
the last place (seeds {seeds}). Marked n and g: these also took each iteration's samples in another order. If a layout
were one more such run, one cell in {chance} would be above 1 by chance; of these {cells}, {above} are.
{rule}
"""
_FIRST_RULE = (
    "Allowed are {first:.0e} for the first step (marked g: two spreads), and two spreads, or {first:.0e}, after it."
)
_BF16_RULE = "Allowed are two spreads, or {first:.0e}."
_FLIPPED = f"""Sums in another order differ in their last bits, which can move a number across the middle between two
codes; a single code can move a loss by more than {FIRST:.0e}, in the first step already. The table of exact sums (fp64)
says what is left without that.
"""
_TITLES = {
    "operands": "## Given the same operand: codes and scales, bit for bit",
    "stock": "## Recipe bf16 and Megatron-core's own layers (`--stock-linears`), bf16, no fused accumulation",
    "resume": "## Stopped and resumed, dropout on, bf16",
    "noise": "## Rounding noise of two data-parallel ranks",
}
_MARKS = {"data-parallel": " n", "the calibration": " c", "experts see": " g"}


def render(
    title: str,
    verdicts: Sequence[Verdict],
    facts: dict[str, object],
    conditions: Sequence[str],
    notes: Sequence[str],
    missing: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        missing: what has no result.
        facts: base, steps, batch, microbatch, sequence and seeds of the introductions.
    """
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    looked = (
        f"{len(verdicts)} cells, {len(wrong)} of them more than allowed." if wrong else f"{len(verdicts)} cells hold."
    )
    if missing:
        looked = f"{looked} {len(missing)} checks have no result."
    parts = [f"# {title}", "\n".join(conditions), f"**{looked}**", _INTRODUCTION.format(**facts)]
    losses = [verdict for verdict in verdicts if verdict.check == "losses"]
    for precision in dict.fromkeys(v.precision for v in losses):
        parts.append(_losses([v for v in losses if v.precision == precision], precision, facts))  # noqa: PERF401
    for check, heading in _TITLES.items():
        found = [verdict for verdict in verdicts if verdict.check == check]
        if found:
            parts.append(f"{heading}\n\n{_list(found)}")
    if wrong:
        lines = [f"- {v.check}, {v.model} {v.layout}, {v.recipe}, {v.precision}: {v.says}" for v in wrong]
        parts.append("## More than allowed\n\n" + "\n".join(lines))
        if any(v.precision != "fp64" and v.check == "losses" for v in wrong):
            parts.append(_FLIPPED)
    if missing:
        parts.append("## No result\n\n" + "\n".join(f"- {what}" for what in missing))
    if notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in notes))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _losses(verdicts: Sequence[Verdict], precision: str, facts: dict[str, object]) -> str:
    seeds = list(facts["seeds"])  # type: ignore[call-overload]
    rule = (_BF16_RULE if precision == "bf16" else _FIRST_RULE).format(first=FIRST)
    parts = [_FP64.format(first=FIRST)]
    if precision != "fp64":
        text = _SPREAD.format(
            precision=precision,
            runs=len(seeds) + 1,
            moved=len(seeds),
            seeds=", ".join(map(str, seeds)),
            rule=rule,
            chance=len(seeds) * (len(seeds) + 1) // 2 + 1,
            cells=len(verdicts),
            above=sum(verdict.bound is not None and _spreads(verdict) > 1 for verdict in verdicts),
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
    return "\n\n".join(part.strip() for part in parts)


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    mark = next((mark for start, mark in _MARKS.items() if verdict.why.startswith(start)), "")
    part = f" ({_spreads(verdict):.2f})" if verdict.bound and verdict.precision != "fp64" else ""
    text = f"{_number(verdict.first)} / {_number(verdict.later)}{part}{mark}"
    return text if verdict.ok else f"**{text}**"


def _spreads(verdict: Verdict) -> float:
    """A later difference in spreads; of nothing but 1e-5 in halves of it."""
    return SPREADS * verdict.later / (verdict.bound or FIRST)


def _number(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def _list(verdicts: Sequence[Verdict]) -> str:
    """One line for all that hold on a layout, and one for each that does not."""
    lines = []
    for model, layout, precision in dict.fromkeys((v.model, v.layout, v.precision) for v in verdicts):
        mine = [v for v in verdicts if (v.model, v.layout, v.precision) == (model, layout, precision)]
        held = [v for v in mine if v.ok]
        if held:
            said = dict.fromkeys(v.says for v in held)
            each = held[0].says if len(said) == 1 else "; ".join(f"`{v.recipe}` {v.says}" for v in held)
            named = f"{len(held)} recipes: " if len(said) == 1 and len(held) > 1 else ""
            lines.append(f"- {model} {layout}, {precision}: {named}{each}")
        lines += [f"- **{model} {layout}, {precision}, `{v.recipe}`: {v.says}**" for v in mine if not v.ok]
    return "\n".join(lines)
