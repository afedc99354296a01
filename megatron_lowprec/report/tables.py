"""Tables of a report, for text and HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lowprec.report.amounts import DASH, amount, number, signed
from megatron_lowprec.report.groups import Group
from megatron_lowprec.report.runs import Run, Status
from megatron_lowprec.report.statistics import BLOCKS, NONE, PRIOR, Fit
from megatron_lowprec.text_tables import plain_table


@dataclass(frozen=True)
class Table:
    """Text cells; columns named in ``left`` are words, the others numbers. A name may have a unit on a second line."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[str]

    def lines(self) -> list[str]:
        """For a terminal."""
        return plain_table(self.columns, self.rows, self.left)


def quality(group: Group, fit: Fit | None, confidence: float) -> Table:
    """Final validation loss and perplexity a recipe, and the gap to the reference with its interval."""
    columns = (
        "recipe",
        "seeds\nfinished",
        f"gap to {group.reference}\n% of perplexity",
        f"{confidence:.0%} interval\n% of perplexity",
        "gap\nperplexity",
        "gap\nnats a token",
        "validation loss\nnats a token",
        "sd over seeds\nnats a token",
        "perplexity\nmean",
        "sd over seeds\nperplexity",
    )
    rows = []
    for label in group.labels:
        runs = group.of(label)
        finished = group.of(label, Status.FINISHED)
        cells = [label, f"{len(finished)} of {len(runs)}" + _diverged(group, label)]
        cells += _gap(group, fit, label)
        if fit is None or not finished:
            cells += [DASH] * 4
        else:
            perplexities = [math.exp(run.curve.final_validation) for run in finished if run.curve is not None]
            spread = float(np.std(perplexities, ddof=1)) if len(perplexities) > 1 else math.nan
            cells += [number(fit.mean(label), 4), number(fit.deviation(label), 4)]
            cells += [number(float(np.mean(perplexities)), 2), number(spread, 2)]
        rows.append(tuple(cells))
    return Table(columns, tuple(rows), frozenset({"recipe"}))


def _gap(group: Group, fit: Fit | None, label: str) -> list[str]:
    has = fit is not None and all(group.of(each, Status.FINISHED) for each in (label, group.reference))
    if fit is None or not has or label == group.reference:
        return [DASH] * 4
    difference = fit.difference(label, group.reference)
    low, high = (100 * math.expm1(min(end, 700.0)) for end in difference.interval)
    interval = f"{signed(low, 2)} to {signed(high, 2)}" if difference.error is not None else "unknown"
    absolute = math.exp(fit.mean(group.reference)) * math.expm1(difference.value)
    percent = signed(100 * math.expm1(difference.value), 2)
    return [percent, interval, signed(absolute, 2), signed(difference.value, 4)]


def _diverged(group: Group, label: str) -> str:
    count = len(group.of(label, Status.DIVERGED))
    return f", {count} diverged" if count else ""


def cost(group: Group) -> Table:
    """Tokens, time, memory and how the GEMMs ran, a recipe."""
    columns = (
        "recipe",
        "tokens\na run",
        "time\nms an iteration",
        "throughput\ntokens/s",
        "peak memory\nGiB a GPU",
        "GEMMs",
        "device",
    )
    rows = []
    for label in group.labels:
        runs = [run for run in group.of(label) if run.curve is not None]
        seconds = _median([run.seconds for run in runs])
        rows.append(
            (
                label,
                amount(group.tokens),
                number(1000 * seconds, 1),
                number(_median([run.tokens_a_second for run in runs]), 0),
                number(_median([run.peak_memory_gib for run in runs]), 2),
                _each([gemms(run) for run in runs]),
                _each([device(run) for run in runs]),
            )
        )
    return Table(columns, tuple(rows), frozenset({"recipe", "GEMMs", "device"}))


def all_runs(runs: Sequence[Run]) -> Table:
    """Every run, however it ended."""
    columns = (
        "run",
        "recipe",
        "seed",
        "ended",
        "how",
        "training loss\nnats a token",
        "validation loss\nnats a token",
        "versions",
        "commit",
        "folder",
    )
    rows = []
    for run in runs:
        losses = (math.nan, math.nan) if run.curve is None else (run.curve.final_train, run.curve.final_validation)
        versions = ", ".join(f"{name} {version}" for name, version in run.record.get("versions", {}).items())
        rows.append(
            (
                run.cell,
                run.label or DASH,
                DASH if run.seed is None else str(run.seed),
                run.status.value,
                run.why,
                *(number(loss, 4) for loss in losses),
                versions or "not recorded",
                str(run.record.get("commit") or "not recorded"),
                str(run.folder),
            )
        )
    words = {"run", "recipe", "ended", "how", "versions", "commit", "folder"}
    return Table(columns, tuple(rows), frozenset(words))


def resolution(group: Group, fit: Fit | None, confidence: float) -> list[str]:
    """Sentences on the noise of a group's final validation losses and on what differences it hides."""
    if fit is None:
        return ["No run finished, so nothing can be compared."]
    if fit.method == NONE:
        return [
            "No recipe has two seeds that finished, and the claims file names no prior noise: no difference between "
            "recipes can be told from chance."
        ]
    if not fit.known:
        return [
            "Runs of different seeds ended with equal losses to the last bit: copies, not seeds. Nothing is resolved."
        ]
    how = {
        BLOCKS: "Recipes share their seeds, which count as blocks",
        PRIOR: "No recipe has two seeds; the claims file's prior noise is assumed",
    }.get(fit.method, "Seeds count as independent runs")
    dof = "" if fit.method == PRIOR else f" with {fit.dof:.0f} degrees of freedom"
    lines = [
        f"{how}. The standard deviation of a final validation loss, pooled over all recipes, is {fit.sigma:.4f} nats a "
        f"token{dof}."
    ]
    others = [label for label in group.labels if label != group.reference and group.of(label, Status.FINISHED)]
    if group.of(group.reference, Status.FINISHED) and others:
        found = [fit.difference(label, group.reference) for label in others]
        widths, detected = [each.half_width for each in found], [fit.detected(each) for each in found]
        lines.append(
            f"The smallest difference to {group.reference} that these seeds resolve at {confidence:.0%} is "
            f"{_range(widths)}; a true difference of {_range(detected)} is found four times out of five."
        )
    lines += [
        f"The runs of {label} scatter over three times as much as the others': the pooled standard deviation is too "
        "small for it and too large for them."
        for label in fit.unlike()
    ]
    repeated = group.repeated()
    if repeated:
        lines.append(f"A seed that a recipe ran more than once counts once, as the mean: {'; '.join(repeated)}.")
    return lines


def _range(losses: Sequence[float]) -> str:
    """Of positive losses, as nats and as percent of perplexity."""
    low, high = min(losses), max(losses)
    nats, percent = f"{low:.4f}", f"{100 * math.expm1(low):.2f}"
    if f"{high:.4f}" != nats:
        nats, percent = f"{nats} to {high:.4f}", f"{percent} to {100 * math.expm1(min(high, 700.0)):.2f}"
    return f"{nats} nats ({percent}% of perplexity)"


def gemms(run: Run) -> str:
    """How the three GEMMs ran: those alike together."""
    recorded = run.record.get("gemms")
    if not isinstance(recorded, dict):
        return "not recorded"
    by_way: dict[str, list[str]] = {}
    for name, way in recorded.items():
        by_way.setdefault(str(way), []).append(name)
    return "; ".join(f"{', '.join(names)} {way}" if len(by_way) > 1 else way for way, names in by_way.items())


def device(run: Run) -> str:
    """Its name and how many processes."""
    name = run.record.get("device")
    return f"{run.record.get('processes', '?')} x {name}" if name else "not recorded"


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def _each(values: Sequence[str]) -> str:
    return " / ".join(dict.fromkeys(values)) or DASH
