"""Runs and claims to a report: the HTML page, the figures, and the lines for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.report import html, operand_plots, operand_tables, plot_style, plots, tables
from megatron_lowprec.report.amounts import amount
from megatron_lowprec.report.claims import Claims
from megatron_lowprec.report.groups import Group, group_runs
from megatron_lowprec.report.operands import RecipeLooks, find_looks
from megatron_lowprec.report.runs import Run, Status
from megatron_lowprec.report.statistics import Fit
from megatron_lowprec.report.verdict import Held, Outcome, Verdict, judge_all, published_gaps

_METHOD = (
    "Runs are compared only with runs of the same model, data and budget. A run counts if it came to its last "
    "iteration and was validated there; one whose loss ended not finite, or far above its lowest, counts as diverged. "
    "Every run is listed, however it ended.",
    "Differences are of final validation losses in nats a token; a perplexity gap is their exponential less one, which "
    "makes it the gap of geometric means. Intervals are Student's t with one standard deviation, pooled over all "
    "recipes of a group. Where recipes share seeds these count as blocks: the same seed means the same weights, data "
    "order and dropout.",
    "A claim is reproduced if the whole interval is on its threshold's side. If all of it is on the other, the claim "
    "is contradicted where the runs have at least {:.0%} of its parameters and of its tokens, and otherwise not "
    "reproduced at this scale. Anything between is not resolvable with these seeds.",
)
_LOOKS = (
    "Medians over layers and seeds (an expert counts as a layer) of the last iteration that was looked at, what is not "
    "finite left out. SNR, in dB, and bias compare the values that codes and scales stand for with what was rounded, "
    "behind a Hadamard transform where there is one; underflow is the share of nonzero entries that become zero, "
    "saturation the share of all entries beyond the format's largest value. The worst layer of any seed is the one "
    "with the lowest SNR; one that is not finite comes before."
)


@dataclass(frozen=True)
class Report:
    """All that was found; ``write`` makes files of it, ``lines`` text."""

    title: str
    claims: Claims
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    fits: Mapping[str, Fit | None]
    looks: Mapping[str, Sequence[RecipeLooks]]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For a terminal: every group's table and resolution, the verdicts, and what was odd."""
        found = [self._counted(), *self.notes]
        for group in self.groups:
            fit = self.fits[group.name]
            confidence = self.claims.rules.confidence
            found += ["", f"{group.name}: {_described(group)}", ""]
            found += [*tables.text(tables.quality(group, fit, confidence)), ""]
            found += tables.resolution(group, fit, confidence)
            looks = self.looks[group.name]
            if looks:
                found += ["", "what quantization did to operands, medians over layers and seeds at the last look:", ""]
                found += tables.text(operand_tables.in_short(looks))
        ended = [run for run in self.runs if run.status is not Status.FINISHED]
        if ended:
            found += ["", "not finished:"]
            found += [f"  {run.cell} ({run.label or 'of no recipe'}): {run.status.value}, {run.why}" for run in ended]
        found += ["", "claims:"]
        for verdict in self.verdicts:
            where = f", {verdict.group.name}" if verdict.group is not None and len(self.groups) > 1 else ""
            found.append(f"  {verdict.outcome.value}: {verdict.claim.id} (arXiv {verdict.claim.source.arxiv}){where}")
            found.append(f"    {verdict.claim.sentence}")
            found += [f"    {finding.words}" for finding in verdict.findings]
            found.append(f"    scale: {verdict.scale}")
        return found

    def write(self, folder: Path) -> Path:
        """report.html, and each figure as PNG besides; the page's path."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder}: cannot be made a folder ({error.strerror}); name another") from None
        look = plot_style.looks(
            list(dict.fromkeys(label for group in self.groups for label in group.labels)), self.groups[0].reference
        )
        body = [html.paragraph(self._counted()), *(html.paragraph(note) for note in self.notes)]
        body += [html.overview(self.verdicts), html.paragraph(self._verdicts(), muted=True)]
        for number, group in enumerate(self.groups, 1):
            body += self._group(group, look, folder, f"group{number}_" if len(self.groups) > 1 else "")
        body += [html.heading("What papers claim"), *(html.verdict(verdict) for verdict in self.verdicts)]
        method = [words.format(self.claims.rules.comparable_scale) for words in _METHOD]
        body += [html.heading("All runs"), html.table(tables.all_runs(self.runs))]
        body += [html.heading("How this was found"), *(html.paragraph(words, muted=True) for words in method)]
        path = folder / "report.html"
        path.write_text(html.page(self.title, body), encoding="utf-8")
        return path

    def _group(self, group: Group, look: Mapping[str, plot_style.Look], folder: Path, prefix: str) -> list[str]:
        fit, confidence = self.fits[group.name], self.claims.rules.confidence
        parts = [html.heading(f"Runs of {group.name}"), html.paragraph(_described(group))]
        pictures = self._curves(group, look) if any(run.curve is not None for run in group.runs) else {}
        gaps = self._gaps(group, fit, look) if fit is not None else None
        if gaps is not None:
            parts.append(html.picture(gaps, alone=True))
        parts.append(html.table(tables.quality(group, fit, confidence)))
        parts += [html.paragraph(words) for words in tables.resolution(group, fit, confidence)]
        parts.append(html.figures([html.picture(each) for each in pictures.values()]))
        looks = self.looks[group.name]
        snr = self._snr(looks, look)
        if looks:
            parts += [html.heading("What quantization did to operands", 3), html.paragraph(_LOOKS, muted=True)]
            parts.append(html.table(operand_tables.of_every_operand(looks)))
        if snr is not None:
            parts.append(html.picture(snr, alone=True))
        for name, shown in {**pictures, "gaps": gaps, "operand_snr": snr}.items():
            if shown is not None:
                (folder / f"{prefix}{name}.png").write_bytes(shown.light)
        return [*parts, html.heading("Cost and conditions", 3), html.table(tables.cost(group))]

    def _snr(self, looks: Sequence[RecipeLooks], look: Mapping[str, plot_style.Look]) -> html.Picture | None:
        caption = (
            "Signal-to-noise ratio of each operand of each GEMM, over iterations. Lines are medians over layers and "
            "seeds, bands the range over them; an operand that is not finite has none."
        )
        return _picture(lambda theme: operand_plots.snr(looks, look, theme), caption)

    def _gaps(self, group: Group, fit: Fit, look: Mapping[str, plot_style.Look]) -> html.Picture | None:
        published = published_gaps(self.claims, group)
        caption = (
            f"Perplexity gap to {group.reference} at the end: mean over seeds with the "
            f"{self.claims.rules.confidence:.0%} interval, and each seed by itself. Published gaps are of the papers' "
            "models and budgets."
        )
        return _picture(lambda theme: plots.gaps(group, fit, look, published, theme), caption)

    def _curves(self, group: Group, look: Mapping[str, plot_style.Look]) -> dict[str, html.Picture]:
        shared = (
            "Lines are means over seeds, bands the range over seeds; the lower panel is the difference to "
            f"{group.reference}, seed by seed."
        )
        smoothed = "Training loss, smoothed: each point is the mean over 2% of the run's iterations around it."
        drawn = (
            ("training_loss", plots.training, f"{smoothed} {shared}"),
            ("validation_loss", plots.validation, f"Validation loss, as measured. {shared}"),
        )
        return {
            name: html.Picture(draw(group, look, plot_style.LIGHT), draw(group, look, plot_style.DARK), caption)
            for name, draw, caption in drawn
        }

    def _counted(self) -> str:
        counts = Counter(run.status for run in self.runs)
        parts = [f"{counts[status]} {status.value}" for status in Status if counts[status]]
        groups = len(self.groups)
        kinds = f" in {groups} groups that are not compared with each other" if groups > 1 else ""
        return f"{len(self.runs)} run{'s' if len(self.runs) > 1 else ''}{kinds}: {', '.join(parts)}."

    def _verdicts(self) -> str:
        counts = Counter(verdict.outcome for verdict in self.verdicts)
        tests = sum(each.held is not Held.MISSING for verdict in self.verdicts for each in verdict.findings)
        parts = [f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome]]
        confidence = self.claims.rules.confidence
        return (
            f"{'; '.join(parts)}. {tests} tests were made, each at {confidence:.0%}: if nothing differed, about "
            f"{tests * (1 - confidence):.1g} would say otherwise by chance."
        )


def build(runs: Sequence[Run], notes: Sequence[str], claims: Claims, reference: str, title: str) -> Report:
    """Group, fit and judge."""
    groups, lost = group_runs(runs, reference)
    if not groups:
        whys = "; ".join(f"{run.folder} {run.why}" for run in runs[:3])
        raise UserError(
            f"none of {len(runs)} runs can be read ({whys}); name folders with metrics.jsonl and config.yaml"
        )
    found = list(notes)
    if lost:
        found.append(f"{len(lost)} of the runs hold no configuration to place them by; they are listed at the end.")
    fits, looks = {}, {}
    for group in groups:
        losses = group.final_losses()
        fits[group.name] = Fit(losses, claims.rules.confidence, claims.prior_noise.validation_loss) if losses else None
        looks[group.name], unread = find_looks(group)
        found += unread
        if reference not in group.labels:
            found.append(f"{group.name} has no run of {reference}, so no gaps to it.")
    verdicts = tuple(judge_all(claims, groups))
    return Report(title, claims, tuple(runs), tuple(groups), fits, looks, verdicts, tuple(found))


def _picture(draw: Callable[[plot_style.Theme], bytes | None], caption: str) -> html.Picture | None:
    """None where there is nothing to draw."""
    light, dark = draw(plot_style.LIGHT), draw(plot_style.DARK)
    return None if light is None or dark is None else html.Picture(light, dark, caption)


def _described(group: Group) -> str:
    count = "an unrecorded number of" if math.isnan(group.parameters) else amount(group.parameters)
    apart = ", ".join(f"{name} {value}" for name, value in group.apart.items())
    return f"{count} parameters, {amount(group.tokens)} tokens a run" + (f"; {apart}" if apart else "") + "."
