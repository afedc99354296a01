"""A report's figures: losses with their difference to the reference, and final perplexity gaps."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from megatron_lowprec.report.amounts import amount, percent
from megatron_lowprec.report.curve import Floats, Status, shared, smooth
from megatron_lowprec.report.groups import Group
from megatron_lowprec.report.plot_style import NOT_FINISHED, Style, Theme, band, gap_axis, limits, literal, wrapped
from megatron_lowprec.report.runs import Run
from megatron_lowprec.report.statistics import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Name: TypeAlias = Literal["training loss", "validation loss"]

_POINTS = 600  # per curve
_MARKED = 40  # most points with a marker each
_SMOOTHING = 100  # a smoothed loss averages 1/_SMOOTHING of the run on either side
_EARLY = 0.1  # first share of the run, ignored for the axis limits of a difference
_FIRST = 0.04  # likewise for a loss
_MOST_RANGES = 8  # recipes beside the reference; the ranges of more cover each other


def gaps(
    group: Group, fit: Fit | None, styles: Mapping[str, Style], published: Mapping[str, Sequence[float]], theme: Theme
) -> bytes | None:
    """PNG: final perplexity gap to the reference, with intervals, single seeds and published gaps (percent).

    None if there is nothing to compare.
    """
    results = group.final_losses()
    labels = [label for label in group.labels if any(label == each for each, _ in results)]
    if fit is None or group.reference not in labels or len(labels) < 2:
        return None
    labels.remove(group.reference)
    figure = theme.new_figure(1.5 + 0.42 * len(labels))
    axes = figure.subplots()
    theme.plain(axes)
    axes.axvline(0, color=theme.muted, linewidth=1)
    ends = []
    for row, label in enumerate(labels):
        paint = styles[label].paint(theme)
        difference = fit.difference(label, group.reference)
        middle = percent(difference.value)
        if math.isfinite(middle):
            ends.append(middle)
        if difference.error is not None:
            low, high = (percent(end) for end in difference.interval)
            ends += [low, high]
            axes.plot([low, high], [row, row], color=paint, linewidth=2.4, solid_capstyle="butt")
        seeds = [
            percent(loss - results[group.reference, seed])
            for (each, seed), loss in results.items()
            if each == label and (group.reference, seed) in results
        ]
        ends += seeds
        axes.plot(seeds, [row + 0.24] * len(seeds), "|", color=paint, markersize=7, markeredgewidth=1.4)
        axes.plot(middle, row, styles[label].marker, color=paint, markersize=7)
        for gap in published.get(label, ()):
            ends.append(gap)
            axes.plot(gap, row - 0.24, "D", markersize=5.5, markerfacecolor="none", markeredgecolor=theme.text)
    axes.set_yticks(range(len(labels)), [wrapped(label) for label in labels])
    axes.set_ylim(len(labels) - 0.45, -0.55)
    limits(axes.set_xlim, [0.0, *ends])
    axes.set_xlabel(f"perplexity gap to {literal(group.reference)} at the end, %")
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    _gap_legend(figure, theme, bool(published))
    return theme.png(figure)


def _gap_legend(figure: Figure, theme: Theme, published: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=theme.text, marker="o", linewidth=2.4, label="gap and interval"),
        Line2D([], [], color=theme.text, marker="|", markersize=7, linestyle="", label="pairs of a seed"),
    ]
    if published:
        style: dict[str, Any] = {"marker": "D", "markersize": 5.5, "markerfacecolor": "none", "linestyle": ""}
        handles.append(Line2D([], [], color=theme.text, label="published, at its scale", **style))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, frameon=False, labelcolor=theme.text, fontsize=9
    )


def has_ranges(group: Group) -> bool:
    """Whether figures of losses show ranges over seeds: with up to eight recipes beside the reference."""
    return len(set(group.finished) - {group.reference}) <= _MOST_RANGES


def losses(name: Name, group: Group, styles: Mapping[str, Style], theme: Theme) -> bytes | None:
    """PNG over tokens: mean over seeds, and that of paired differences to the reference.

    Ranges over seeds are shown as ``has_ranges`` says. Training losses are smoothed, validation losses have
    markers. None if no run has losses.
    """
    if all(run.curve is None for run in group.runs):
        return None
    markers = name == "validation loss"
    common = {label: _common(group.of(label, Status.FINISHED), name) for label in group.finished}
    finished = {label: (at, np.stack([*seeds.values()])) for label, (at, seeds) in common.items() if len(at)}
    pairs = {label: _paired(group, label, name) for label in group.compared}
    compared = {label: pair for label, pair in pairs.items() if len(pair[0])}
    stopped = [run for run in group.runs if run.status is not Status.FINISHED and run.curve is not None]
    rest = [(run, at, values) for run in stopped for at, (values,) in [_drawn([run], name)] if len(at)]
    figure = theme.new_figure(6.6 if compared else 3.9)
    panels = figure.subplots(2 if compared else 1, 1, sharex=True, squeeze=False)[:, 0]
    top = panels[0]
    ranges = has_ranges(group)
    seen: list[Floats] = []
    for label, (iterations, values) in finished.items():
        x = group.of(label, Status.FINISHED)[0].tokens_at(iterations)
        _mean(top, x, values, styles[label], theme, label, ranges, markers)
        seen.append(values[:, x >= _FIRST * x[-1]])
    for run, iterations, values in rest:
        x = run.tokens_at(iterations)
        label = f"{wrapped(run.label)}, not finished"
        dotted: dict[str, Any] = {"linewidth": 1.1, "linestyle": NOT_FINISHED, "marker": "x", "markersize": 6}
        top.plot(x, values, color=styles[run.label].paint(theme), markevery=[len(x) - 1], label=label, **dotted)
        if not finished:  # else finished runs set the limits, and a diverged loss leaves the picture
            seen.append(values[None, x >= _FIRST * x[-1]])
    _loss_axis(top, seen, name, theme)
    if compared:
        bottom = panels[1]
        theme.plain(bottom)
        bottom.axhline(0, color=theme.muted, linewidth=1)
        ends = []
        for label, (iterations, differences) in compared.items():
            x = group.of(label, Status.FINISHED)[0].tokens_at(iterations)
            _mean(bottom, x, differences, styles[label], theme, label, ranges, markers)
            drawn = differences if ranges else differences.mean(axis=0, keepdims=True)
            ends += list(drawn[:, x >= _EARLY * x[-1]].ravel())
        scale = gap_axis(bottom, [0.0, *(end for end in ends if math.isfinite(end))])
        bottom.set_ylabel(f"less {literal(group.reference)}'s, nats a token\n{scale}".rstrip())
    panels[-1].set_xlabel("tokens")
    panels[-1].xaxis.set_major_formatter(lambda value, _: amount(value))
    theme.legend(figure, [top])
    return theme.png(figure)


def _drawn(runs: Sequence[Run], name: Name) -> tuple[np.ndarray, list[Floats]]:
    """Iterations with losses in all of one run or more, and each one's losses there.

    Training losses are smoothed and thinned after that, so that a run that lacks an iteration keeps step with the rest.
    """
    curves = [run.curve for run in runs if run.curve is not None]
    if name == "validation loss":
        return shared([curve.validation for curve in curves])
    iterations, losses = shared([curve.train for curve in curves])
    reach = max(1, len(curves[0].train[0]) // _SMOOTHING)
    smoothed = [smooth((iterations, each), reach) for each in losses]
    every = max(1, len(smoothed[0][0]) // _POINTS)
    return smoothed[0][0][::every], [values[::every] for _, values in smoothed]


def _common(runs: Sequence[Run], name: Name) -> tuple[np.ndarray, dict[tuple[str, Hashable], Floats]]:
    """Iterations common to all runs, and (label, seed) -> losses there: a repeated seed counts once, as the mean."""
    iterations, found = _drawn(runs, name)
    values: dict[tuple[str, Hashable], list[Floats]] = {}
    for run, losses in zip(runs, found, strict=True):
        values.setdefault((run.label, run.block), []).append(losses)
    return iterations, {key: np.mean(each, axis=0) for key, each in values.items()}


def _paired(group: Group, label: str, name: Name) -> tuple[np.ndarray, Floats]:
    """Differences to the reference, one row per shared seed; without shared seeds one row, of the means."""
    left, right = group.of(label, Status.FINISHED), group.of(group.reference, Status.FINISHED)
    iterations, found = _common([*left, *right], name)
    ours = {seed: losses for (each, seed), losses in found.items() if each == label}
    others = {seed: losses for (each, seed), losses in found.items() if each != label}
    pairs = [losses - others[seed] for seed, losses in ours.items() if seed in others]
    return iterations, np.stack(pairs or [np.mean([*ours.values()], axis=0) - np.mean([*others.values()], axis=0)])


def _mean(
    axes: Axes, x: Floats, values: Floats, style: Style, theme: Theme, label: str, ranges: bool, markers: bool
) -> None:
    """Plot the mean over seeds, one row each, and their range if asked."""
    ends = (values.min(axis=0), values.max(axis=0)) if ranges and len(values) > 1 else None
    band(axes, x, values.mean(axis=0), ends, style, theme, label, markers and len(x) <= _MARKED)


def _loss_axis(axes: Axes, seen: Sequence[Floats], name: str, theme: Theme) -> None:
    theme.plain(axes)
    values = np.concatenate([each.ravel() for each in seen]) if seen else np.array([1.0])
    low, high = float(values.min(initial=math.inf)), float(values.max(initial=-math.inf))
    logarithmic = low > 0 and high > 1.5 * low and math.isfinite(high)
    if logarithmic:
        from matplotlib.ticker import MaxNLocator, NullLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(MaxNLocator(7))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
    elif math.isfinite(high):
        limits(axes.set_ylim, [low, high])
    axes.set_ylabel(f"{name}, nats a token" + (" (log)" if logarithmic else ""))
