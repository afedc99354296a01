"""Builds a report from runs and claims: the HTML page, the figures, and the lines for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.report import html, operand_plots, operand_tables, plot_style, plots, tables
from megatron_lowprec.report.amounts import amount
from megatron_lowprec.report.claims import BF16, Claims
from megatron_lowprec.report.curve import Status
from megatron_lowprec.report.groups import Group, group_runs
from megatron_lowprec.report.ladder.gap_plot import gap_by_tokens
from megatron_lowprec.report.ladder.gap_points import (
    SOURCE,
    Line,
    best_measured,
    comparable_roundings,
    measured_lines,
    published_lines,
)
from megatron_lowprec.report.ladder.gap_table import gap_table
from megatron_lowprec.report.operands import Snapshots, find_snapshots
from megatron_lowprec.report.planning.required_runs import required_runs
from megatron_lowprec.report.published.evidence import LEFT_OPEN, Evidence, evidence
from megatron_lowprec.report.published.figures import published_gaps
from megatron_lowprec.report.published.ladder import PublishedRun
from megatron_lowprec.report.runs import Run
from megatron_lowprec.report.statistics import Fit
from megatron_lowprec.report.verdict import Held, Outcome, Verdict, judge_all

_IN_SHORT = (Outcome.NOT_TESTED, Outcome.NOT_LOSSES)  # which the terminal only counts; the page has them in full


@dataclass(frozen=True)
class Report:
    """Results of a report; ``write`` creates its files, ``lines`` its terminal text."""

    title: str
    claims: Claims
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    fits: Mapping[str, Fit | None]
    snapshots: Mapping[str, Sequence[Snapshots]]
    measured: tuple[Line, ...]  # gaps over tokens per parameter, of all groups
    published: tuple[Line, ...]  # likewise, of other projects' runs
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]
    others: Mapping[str, Evidence]

    @property
    def shortened(self) -> dict[str, str]:
        """Short label -> the recipe with all its overrides."""
        return {run.label: run.full_label for run in self.runs if run.label != run.full_label}

    def beside(self, verdict: Verdict) -> Evidence | None:
        """What others' runs say of a claim that the own runs neither reproduce nor contradict, if any are named."""
        return self.others.get(verdict.claim.id) if verdict.outcome in LEFT_OPEN else None

    def gap_table(self) -> tables.Table | None:
        """Gaps of the figure's lines by model and budget; None if no line has two budgets."""
        return gap_table(self.measured, self.groups[0].reference, self.claims.rules.confidence)

    def lines(self) -> list[str]:
        """Terminal text: notes, each group's table and resolution, and the verdicts."""
        found = [self._counted(), *self.notes]
        confidence = self.claims.rules.confidence
        several = len(self.groups) > 1
        if several:
            found += ["", *tables.all_groups(self.groups, self.fits, confidence).lines()]
        budgets = self.gap_table()
        if budgets is not None:
            what = f"gaps by model and budget (±: half width of the {confidence:.0%} interval):"
            found += ["", what, "", *budgets.lines()]
        for group in self.groups:
            fit = self.fits[group.name]
            found += ["", f"{group.name}: {_described(group)}", ""]
            if not several:
                found += [*tables.quality(group, fit, confidence).lines(), ""]
            found += tables.resolution(group, fit, confidence)
            snapshots = self.snapshots[group.name]
            if snapshots:
                what = "what quantization did to operands, medians over layers and seeds at the last snapshot:"
                found += ["", what, ""]
                found += operand_tables.in_short(snapshots).lines()
                outputs = operand_tables.of_outputs(snapshots)
                what = "error of GEMM outputs, likewise:"
                found += [] if outputs is None else ["", what, "", *outputs.lines()]
        if self.shortened:
            found += ["", "labels:", *(f"  {label}: {full}" for label, full in self.shortened.items())]
        ended = [run for run in self.runs if run.status is not Status.FINISHED]
        if ended:
            found += ["", "not finished:"]
            found += [f"  {run.cell} ({run.label or 'of no recipe'}): {run.status.value}, {run.why}" for run in ended]
        found += ["", "claims:"] if self.verdicts else []
        for verdict in self.verdicts:
            if verdict.outcome in _IN_SHORT:
                continue
            where = f", {verdict.group.name}" if verdict.group is not None and len(self.groups) > 1 else ""
            found.append(f"  {verdict.outcome.value}: {verdict.claim.id} (arXiv {verdict.claim.source.arxiv}){where}")
            found.append(f"    {verdict.claim.sentence}")
            found += [f"    {words}" for words in verdict.measured]
            found += [f"    {verdict.note}"] if verdict.note else []
            found += [f"    margin: {verdict.margin}", f"    scale: {verdict.scale}"]
            found += [f"    {words}" for words in verdict.required]
            others = self.beside(verdict)
            if others is not None:
                found += [f"    {others.said.value}:", *(f"      {words}" for words in others.words)]
        for outcome in _IN_SHORT:
            count = sum(verdict.outcome is outcome for verdict in self.verdicts)
            found += [f"  {outcome.value}: {count}, listed on the page"] if count else []
        return found

    def write(self, folder: Path) -> Path:
        """Write report.html and each figure as PNG; returns the page's path."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder}: cannot be made a folder ({error.strerror}); name another") from None
        reference = self.groups[0].reference
        labels = list(dict.fromkeys(label for group in self.groups for label in group.labels))
        styles = plot_style.styles(labels, reference)
        ladder = _picture(partial(gap_by_tokens, self.measured, self.published, reference, styles))
        if ladder is not None:
            (folder / "gap_by_tokens.png").write_bytes(ladder.light)
        sections = [self._section(group, styles) for group in self.groups]
        for number, section in enumerate(sections, 1):
            prefix = f"group{number}_" if len(sections) > 1 else ""
            for name, picture in section["pictures"].items():
                if picture is not None:
                    (folder / f"{prefix}{name}.png").write_bytes(picture.light)
        text = html.page(
            title=self.title,
            counted=self._counted(),
            notes=self.notes,
            verdicts=self.verdicts,
            tokens_per_parameter=f"{self.claims.rules.tokens_per_parameter:g}",
            shown=[verdict for verdict in self.verdicts if verdict.outcome not in _IN_SHORT],
            folded=[verdict for verdict in self.verdicts if verdict.outcome in _IN_SHORT],
            shortened=self.shortened,
            judged=self._judged(),
            beside=self.beside,
            ladder=ladder,
            gap_table=self.gap_table(),
            reference=reference,
            published=bool(self.published),
            groups=sections,
            all_groups=(
                tables.all_groups(self.groups, self.fits, self.claims.rules.confidence) if len(sections) > 1 else None
            ),
            runs=tables.all_runs(self.runs),
            confidence=f"{self.claims.rules.confidence:.0%}",
            comparable_scale=f"{self.claims.rules.comparable_scale:.0%}",
        )
        path = folder / "report.html"
        path.write_text(text, encoding="utf-8")
        return path

    def _section(self, group: Group, styles: Mapping[str, plot_style.Style]) -> dict[str, Any]:
        """Content of the page's section on a group."""
        fit, snapshots, confidence = self.fits[group.name], self.snapshots[group.name], self.claims.rules.confidence
        published = published_gaps(self.claims, group)
        drawings = {
            "gaps": partial(plots.gaps, group, fit, styles, published),
            "training_loss": partial(plots.losses, "training loss", group, styles),
            "validation_loss": partial(plots.losses, "validation loss", group, styles),
            "operand_snr": partial(operand_plots.snr, snapshots, styles),
        }
        return {
            "name": group.name,
            "reference": group.reference,
            "ranges": plots.has_ranges(group),
            "described": _described(group),
            "pictures": {name: _picture(draw) for name, draw in drawings.items()},
            "quality": tables.quality(group, fit, confidence),
            "resolution": tables.resolution(group, fit, confidence),
            "operands": operand_tables.of_every_operand(snapshots) if snapshots else None,
            "outputs": operand_tables.of_outputs(snapshots),
            "gradient_norms": tables.gradient_norms(group),
            "cost": tables.cost(group),
        }

    def _counted(self) -> str:
        counts = Counter(run.status for run in self.runs)
        parts = [f"{counts[status]} {status.value}" for status in Status if counts[status]]
        groups = len(self.groups)
        kinds = f" in {groups} groups that are not compared with each other" if groups > 1 else ""
        return f"{len(self.runs)} run{'s' if len(self.runs) > 1 else ''}{kinds}: {', '.join(parts)}."

    def _judged(self) -> str:
        counts = Counter(verdict.outcome for verdict in self.verdicts)
        tests = sum(
            each.held not in (Held.MISSING, Held.UNPAIRED)
            for verdict in self.verdicts
            for each in verdict.findings
            if verdict.outcome is not Outcome.TOO_FEW_TOKENS
        )
        parts = [f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome]]
        confidence = self.claims.rules.confidence
        if not tests:
            return f"{'; '.join(parts)}. No test was made."
        made = "1 test was" if tests == 1 else f"{tests} tests were"
        return (
            f"{'; '.join(parts)}. {made} made, each at {confidence:.0%}: if nothing differed, about "
            f"{tests * (1 - confidence):.1g} would say otherwise by chance."
        )


def build(
    runs: Sequence[Run],
    notes: Sequence[str],
    claims: Claims,
    reference: str,
    title: str,
    published: Sequence[PublishedRun] = (),
) -> Report:
    """Group the runs, fit the noise and judge the claims.

    Args:
        runs: from ``find_runs``, with its ``notes``.
        claims: from ``load_claims``.
        reference: label that gaps refer to, short or in full.
        title: of the page.
        published: runs that the ladder figure may show beside comparable recipes; from ``read_ladder``.

    Raises:
        UserError: no run can be read; or none has the label ``reference``, unless it is bf16.
    """
    groups, lost = group_runs(runs, reference)
    if not groups:
        whys = "; ".join(f"{run.place} {run.why}" for run in runs[:3])
        raise UserError(
            f"none of {len(runs)} runs can be read ({whys}); name folders with metrics.jsonl and config.yaml"
        )
    labelled = {run.folder: run for group in groups for run in group.runs}  # recipes of one name have other labels
    runs = [labelled.get(run.folder, run) for run in runs]
    reference = next((run.label for run in runs if run.full_label == reference), reference)
    labels = list(dict.fromkeys(run.label for run in runs if run.label))
    if reference not in (BF16, *labels):
        raise UserError(f"--reference {reference}: no run has that label; there are {', '.join(labels)}")
    groups = [replace(group, reference=reference) for group in groups]
    found = list(notes)
    if lost:
        found.append(f"{len(lost)} of the runs hold no configuration to place them by; they are listed at the end.")
    if groups[0].of_model:
        found.append(f"Groups of different models differ as well in {', '.join(sorted(groups[0].of_model))}.")
    fits, snapshots = {}, {}
    for group in groups:
        losses = group.final_losses()
        fits[group.name] = Fit(losses, claims.rules.confidence, claims.prior_noise.validation_loss) if losses else None
        snapshots[group.name], unread = find_snapshots(group)
        found += unread
        if reference not in group.labels:
            found.append(f"{group.name} has no run of {reference}, so no gaps to it.")
        found += tables.growing_norms(group)
    measured, unsized = measured_lines(groups, fits)
    found += [f"{name} is not in gap_by_tokens.png: its options give no number of parameters." for name in unsized]
    measured, omitted = best_measured(measured)
    if omitted:
        found.append(
            "gap_by_tokens.png has the eight recipes with the most budgets and seeds; the figures of gaps of single "
            f"groups have the others: {', '.join(omitted)}."
        )
    roundings = comparable_roundings(groups, {line.label for line in measured})
    lines = published_lines(published, roundings)
    if roundings and not lines:
        found.append(
            f"gap_by_tokens.png has no published runs: no file with runs of {SOURCE} comparable to the MXFP4 recipes "
            "was read; name the shipped data/quartet2-runs.csv with --published."
        )
    judged = judge_all(claims, groups)
    verdicts = tuple(replace(verdict, required=required_runs(verdict, claims)) for verdict in judged)
    ladder = tuple(measured), tuple(lines)
    return Report(
        title, claims, tuple(runs), tuple(groups), fits, snapshots, *ladder, verdicts, tuple(found), evidence(claims)
    )


def _picture(draw: Callable[[plot_style.Theme], bytes | None]) -> html.Picture | None:
    light, dark = draw(plot_style.LIGHT), draw(plot_style.DARK)
    return None if light is None or dark is None else html.Picture(light, dark)


def _described(group: Group) -> str:
    count = "an unrecorded number of" if math.isnan(group.parameters) else amount(group.parameters)
    apart = ", ".join(f"{name} {value}" for name, value in group.apart.items() if name not in group.of_model)
    return f"{count} parameters, {amount(group.tokens)} tokens a run" + (f"; {apart}" if apart else "") + "."
