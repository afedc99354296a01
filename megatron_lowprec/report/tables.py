"""Tables of a report, for text and HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lowprec.report.amounts import DASH, amount, number, percent, share, signed
from megatron_lowprec.report.curve import Status
from megatron_lowprec.report.groups import Group
from megatron_lowprec.report.runs import Run
from megatron_lowprec.report.statistics import BLOCKS, FEWEST, NONE, PRIOR, Fit
from megatron_lowprec.report.verdict import Outcome, Verdict, constant
from megatron_lowprec.text_tables import plain_table

_FIFTHS = ("first", "second", "third", "fourth", "last")
_NATS, _BITS = "nats", "bits a byte"
_GROWTH = 2.0  # of the gradient norm; 289 of the 291 runs in docs/results stay below 1.51


@dataclass(frozen=True)
class Table:
    """Text cells; columns named in ``left`` are words, the others numbers. A name may have a unit on a second line."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[str]

    @staticmethod
    def of(rows: Sequence[Mapping[str, str]], left: Iterable[str]) -> Table:
        """A table from rows that map each column to its cell, all in the same order."""
        return Table(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), frozenset(left))

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        return plain_table(self.columns, self.rows, self.left)


def quality(group: Group, fit: Fit | None, confidence: float, texts: Sequence[str] | None = None) -> Table:
    """Gap of each recipe to the reference with its interval, final validation loss, losses by text, and throughput.

    ``texts`` names the columns of ``text_columns``; by default those of the group.
    """
    rows, texts = [], text_columns([group]) if texts is None else texts
    for label in group.labels:
        finished = _count_seeds(group.of(label, Status.FINISHED))
        started = {run.block for run in group.of(label) if run.status is not Status.NOT_STARTED}  # in any sweep
        waiting = [run for run in group.of(label, Status.NOT_STARTED) if run.block not in started]
        others = [(Status.DIVERGED.value, group.of(label, Status.DIVERGED)), (Status.NOT_STARTED.value, waiting)]
        scored = [run for run in group.of(label, Status.FINISHED) if run.texts]
        if _count_seeds(scored) < finished:  # columns of texts have means of these
            others.append(("scored", scored))
        runs = _with_losses(group, label)
        known = fit if finished else None
        gap = _gap(group, fit, label)
        row = {
            "recipe": label,
            "seeds\nfinished": f"{finished} of {_count_seeds(group.of(label))}"
            + "".join(f", {_count_seeds(each)} {how}" for how, each in others if each),
            f"gap to {group.reference}\nnats": gap[0],
            f"{confidence:.0%} interval\nnats": gap[1],
            "gap\n% of perplexity": gap[2],
            f"{confidence:.0%} interval\n% of perplexity": gap[3],
            "validation loss\nnats": number(known.mean(label) if known else math.nan, 4),
            "seeds' sd\nnats": number(known.deviation(label) if known else math.nan, 4),
            **_by_text(group.of(label, Status.FINISHED), texts),
            "throughput\ntokens/s": number(_median([run.tokens_a_second for run in runs]), 0),
            "GEMMs": _execution(runs),
        }
        rows.append(row)
    return Table.of(rows, {"recipe", "GEMMs"})


def text_columns(groups: Sequence[Group]) -> list[str]:
    """Columns of the texts on which finished runs were scored: nats a token, and bits a byte where those are known."""
    scored = [run.texts for group in groups for run in group.runs if run.status is Status.FINISHED]
    names = dict.fromkeys(name for texts in scored for name in texts)
    known = {name for texts in scored for name, loss in texts.items() if not math.isnan(loss.bits)}
    return [f"{name}\n{unit}" for name in names for unit in (_NATS, _BITS) if unit == _NATS or name in known]


def _by_text(runs: Sequence[Run], columns: Sequence[str]) -> dict[str, str]:
    """Mean over the seeds in each of these columns."""
    cells = {}
    for column in columns:
        name, _, unit = column.rpartition("\n")
        by_seed: dict[Hashable, list[float]] = {}
        for run in (run for run in runs if name in run.texts):
            loss = run.texts[name]
            by_seed.setdefault(run.block, []).append(loss.nats if unit == _NATS else loss.bits)
        means = [np.mean(values) for values in by_seed.values()]
        cells[column] = number(float(np.mean(means)) if means else math.nan, 4)
    return cells


def all_groups(groups: Sequence[Group], fits: Mapping[str, Fit | None], confidence: float) -> Table:
    """The rows of ``quality`` of several groups with one reference, without the intervals in perplexity."""
    rows, texts = [], text_columns(groups)
    for group in groups:
        table = quality(group, fits[group.name], confidence, texts)
        for row in table.rows:
            cells = dict(zip(table.columns, row))
            del cells[f"{confidence:.0%} interval\n% of perplexity"]
            rows.append({"group": group.name, **cells})
    return Table.of(rows, {"group", "recipe", "GEMMs"})


def _count_seeds(runs: Sequence[Run]) -> int:
    """Seeds of these runs: a repeated one counts once, and each run without a known seed by itself."""
    return len({run.block for run in runs})


def _gap(group: Group, fit: Fit | None, label: str) -> list[str]:
    if fit is None or label not in group.compared:
        return [DASH] * 4
    difference = fit.difference(label, group.reference)
    cells = []
    for convert, decimals in ((float, 4), (percent, 2)):
        low, high = (signed(convert(end), decimals) for end in difference.interval)
        cells.append(signed(convert(difference.value), decimals))
        cells.append(f"{low} to {high}" if difference.error is not None else "unknown")
    return cells


def claims(verdicts: Sequence[Verdict], confidence: float) -> Table | None:
    """A row for each test of each claim that runs measure, with the verdict in the first; None if they measure none."""
    rows = []
    for verdict in verdicts:
        group = verdict.group
        if group is None or verdict.outcome is Outcome.NOT_TESTED:
            continue
        shares = {
            f"share of its {name}": share(here / there) if there and not math.isnan(here) else DASH
            for name, (there, here) in verdict.claim.scale.beside(group).items()
        }
        for at, finding in enumerate(verdict.findings):
            compared, measured, interval, asked = finding.cells
            row = {"claim": verdict.claim.id, **shares, "difference": compared, "measured": measured}
            row |= {
                f"{confidence:.0%} interval": interval,
                "asked": asked,
                "verdict": "" if at else verdict.outcome.value,
            }
            rows.append({"group": group.name, **row})
    if len({row["group"] for row in rows}) == 1:
        rows = [{name: cell for name, cell in row.items() if name != "group"} for row in rows]
    return Table.of(rows, {"group", "claim", "difference", "asked", "verdict"}) if rows else None


def cost(group: Group) -> Table:
    """Tokens, time, memory and GEMM execution with its reasons, per recipe."""
    rows = []
    for label in group.labels:
        runs = _with_losses(group, label)
        row = {
            "recipe": label,
            "tokens\na run": amount(group.tokens),
            "time\nms an iteration": number(1000 * _median([run.seconds for run in runs]), 1),
            "peak memory\nGiB a GPU": number(_median([run.peak_memory_gib for run in runs]), 2),
            "GEMMs": _each([gemms(run) for run in runs]),
            "device": _each([device(run) for run in runs]),
        }
        rows.append(row)
    return Table.of(rows, {"recipe", "GEMMs", "device"})


def gradient_norms(group: Group) -> Table | None:
    """The median gradient norm of each run in each fifth of its iterations; None if no run recorded one."""
    rows = [
        {
            "recipe": run.label,
            "seed": DASH if run.seed is None else str(run.seed),
            **{f"{name} fifth": number(norm, 2) for name, norm in zip(_FIFTHS, run.norms_by_fifth, strict=True)},
            "largest": number(float(run.gradient_norms[1].max()), 1),
        }
        for label in group.labels
        for run in group.of(label)
        if run.gradient_norms is not None
    ]
    return Table.of(rows, {"recipe"}) if rows else None


def growing_norms(group: Group) -> list[str]:
    """A sentence for each run whose median gradient norm in the last fifth is over twice the middle fifth's."""
    found = []
    for run in group.runs:
        *_, middle, _, last = run.norms_by_fifth
        if last > _GROWTH * middle:
            found.append(
                f"{run.cell}: the gradient norm grew late, from a median of {middle:.2f} in the middle fifth of the "
                f"iterations to {last:.2f} in the last."
            )
    return found


def all_runs(runs: Sequence[Run]) -> Table:
    """Every run, whatever its status."""
    rows = []
    for run in runs:
        losses = (math.nan, math.nan) if run.curve is None else (run.curve.final_train, run.curve.final_validation)
        versions = ", ".join(f"{name} {version}" for name, version in run.record.get("versions", {}).items())
        row = {
            "run": run.cell,
            "recipe": run.label or DASH,
            "seed": DASH if run.seed is None else str(run.seed),
            "ended": run.status.value,
            "how": run.why,
            "training loss\nnats a token": number(losses[0], 4),
            "validation loss\nnats a token": number(losses[1], 4),
            "versions": versions or "not recorded",
            "commit": str(run.record.get("commit") or "not recorded"),
            "folder": run.place,
        }
        rows.append(row)
    return Table.of(rows, {"run", "recipe", "ended", "how", "versions", "commit", "folder"})


def resolution(group: Group, fit: Fit | None, confidence: float) -> list[str]:
    """Sentences on the noise of a group's final validation losses and on the differences that it hides."""
    repeated = group.repeated()
    twice = f"A seed that a recipe ran more than once counts once, as the mean: {'; '.join(repeated)}."
    return [*_noise(group, fit, confidence), *([twice] if repeated else [])]


def _noise(group: Group, fit: Fit | None, confidence: float) -> list[str]:
    if fit is None:
        return ["No run finished, so nothing can be compared."]
    if fit.method == NONE:
        return [
            "No recipe has two seeds that finished, and the claims file names no prior noise: no difference between "
            "recipes can be told from chance."
        ]
    if not fit.known:
        first, *others = group.finished
        alike = [f"{label} and {first} are {words}" for label in others if (words := constant(fit, label, first))]
        if alike:
            said = "; ".join(alike)
            return [f"Under every seed {said}. No noise is left to measure, and more seeds would show the same."]
        return [
            "Runs of different seeds ended with equal losses to the last bit: copies, not seeds. Nothing is resolved."
        ]
    how = {
        BLOCKS: "Recipes share their seeds, which count as blocks",
        PRIOR: "No recipe has two seeds; the claims file's prior noise is assumed",
    }.get(fit.method) or _why_independent(fit)
    dof = "" if fit.method == PRIOR else f" with {_count(fit.dof, 'degree')} of freedom"
    but = f" but {' and '.join(fit.aside)}" if fit.aside else ""
    lines = [
        f"{how}. The standard deviation of a final validation loss, pooled over all recipes{but}, is {fit.sigma:.4f} "
        f"nats a token{dof}."
    ]
    lines += [
        f"The runs of {label} scatter more than the others' (F test, at most 2% for the group): its differences have "
        "the noise of its own pairs."
        for label in fit.aside
    ]
    differences = [fit.difference(label, group.reference) for label in group.compared if label not in fit.aside]
    found = [each for each in differences if each.error is not None]  # the others share no seed with the reference
    if found:
        widths, detected = [each.half_width for each in found], [each.detected for each in found]
        lines.append(
            f"The smallest difference to {group.reference} that these seeds resolve at {confidence:.0%} is "
            f"{_range(widths)}; a true difference of {_range(detected)} is found four times out of five."
        )
    return lines


def _why_independent(fit: Fit) -> str:
    """Why seeds are no blocks, what would make them blocks, and where claims differ."""
    more = fit.seeds_to_blocks
    if more is None:
        return "Seeds count as independent runs, since a single recipe has no pairs"
    there = f"there {'is' if fit.block_dof == 1 else 'are'} {fit.block_dof:.0f}"
    words = f"Seeds count as independent runs: seeds as blocks need {FEWEST} degrees of freedom, {there}; "
    words += f"{_count(more, 'more shared seed')} would do"
    if fit.block_dof:
        words += ". The table's intervals are therefore unpaired, while those of claims pair equal seeds"
    return words


def _count(number: float, what: str) -> str:
    return f"{number:.0f} {what}{'' if number == 1 else 's'}"


def _range(losses: Sequence[float]) -> str:
    """Range of positive losses, in nats and in percent of perplexity."""
    low, high = min(losses), max(losses)
    nats, gap = f"{low:.4f}", f"{percent(low):.2f}"
    if f"{high:.4f}" != nats:
        nats, gap = f"{nats} to {high:.4f}", f"{gap} to {percent(high):.2f}"
    return f"{nats} nats ({gap}% of perplexity)"


def gemms(run: Run) -> str:
    """Execution of the three GEMMs, equal ones combined; of a recipe with phases in each that ran."""
    texts: dict[str, list[str]] = {}
    for phase, recorded in _recorded(run).items():
        by_way: dict[str, list[str]] = {}
        for name, way in recorded.items():
            by_way.setdefault(str(way), []).append(name)
        ways = [f"{', '.join(names)} {way}" if len(by_way) > 1 else way for way, names in by_way.items()]
        texts.setdefault("; ".join(ways), []).append(f"phase {phase}" if phase != "0" else "before phases")
    if len(texts) < 2:
        return "".join(texts) or "not recorded"
    return "; ".join(f"{', '.join(phases)}: {text}" for text, phases in texts.items())


def _recorded(run: Run) -> dict[str, dict[str, str]]:
    """Phase of the recipe -> GEMM -> its backend; phase 0 is that without phases; empty if not recorded."""
    phases, recorded = run.record.get("gemms_of_phases"), run.record.get("gemms")
    found: dict[str, Any] = phases if isinstance(phases, dict) else {"0": recorded}
    return {
        str(phase): found[phase]
        for phase in sorted(found, key=lambda phase: (len(str(phase)), str(phase)))
        if isinstance(found[phase], dict)
    }


def _execution(runs: Sequence[Run]) -> str:
    """Names of the backends, without reasons; "mixed" if runs differ or not all record it."""
    found = {_words(_recorded(run)) for run in runs}
    return "mixed" if len(found) > 1 else "".join(found) or DASH


def _words(recorded: Mapping[str, Mapping[str, str]]) -> str:
    if not recorded:
        return "not recorded"
    # "<backend> on <device>"; runs of earlier releases: "native on <device>" or "emulated: <reason>"
    used = {re.split("[ ,:]", str(way))[0] for gemms in recorded.values() for way in gemms.values()}
    used.discard("not")  # quantized
    return ", ".join(sorted(used, key=lambda name: (name == "emulated", name))) or "not quantized"


def device(run: Run) -> str:
    """Device name and number of processes."""
    name = run.record.get("device")
    return f"{run.record.get('processes', '?')} x {name}" if name else "not recorded"


def _with_losses(group: Group, label: str) -> list[Run]:
    return [run for run in group.of(label) if run.curve is not None]


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def _each(values: Sequence[str]) -> str:
    return " / ".join(dict.fromkeys(values)) or DASH
