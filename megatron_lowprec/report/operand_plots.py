"""Figure of the operands' signal-to-noise ratio during training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_lowprec.report.amounts import amount
from megatron_lowprec.report.operands import KINDS, Snapshots, median
from megatron_lowprec.report.plot_style import NOT_FINISHED, Style, Theme, band, limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2  # operands of a GEMM, side by side
_MARKED = 12  # most points with a marker each


def snr(snapshots: Sequence[Snapshots], styles: Mapping[str, Style], theme: Theme) -> bytes | None:
    """PNG: signal-to-noise ratios over iterations, a panel for each operand of each GEMM, median and range of layers.

    None if no operand has a quantization error.
    """
    found = {kind: {each.label: each.snr(kind) for each in snapshots if kind in each.kinds} for kind in KINDS}
    shown = {kind: series for kind, series in found.items() if series}
    seen = [value for series in shown.values() for each in series.values() for at in each.values() for value in at]
    if not seen:
        return None
    columns = min(_COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    figure = theme.new_figure(1.1 + 1.9 * lines)
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, (kind, series) in zip(panels, shown.items()):
        theme.plain(axes)
        axes.set_title(" ".join(kind), loc="left", fontsize=9.5, color=theme.text)
        for each in snapshots:
            if each.label in series:
                _layers(axes, each, series[each.label], styles[each.label], theme)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    _axes(panels[: len(shown)], columns, seen)
    theme.legend(figure, panels)
    return theme.png(figure)


def _layers(axes: Axes, each: Snapshots, series: Mapping[int, Sequence[float]], style: Style, theme: Theme) -> None:
    """Median and range, interrupted where no layer has a ratio; dotted if no run finished."""
    middle, low, high = (
        np.array([take(values) if values else math.nan for values in series.values()]) for take in (median, min, max)
    )
    style = style if each.finished else replace(style, dashes=NOT_FINISHED)
    band(axes, np.array(list(series)), middle, (low, high), style, theme, each.title, len(series) <= _MARKED)


def _axes(panels: Sequence[Axes], columns: int, seen: Sequence[float]) -> None:
    """Set common limits; iterations are labeled on panels with none below."""
    from matplotlib.ticker import MaxNLocator

    for axes in panels[-columns:]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("iteration")
    for axes in panels[::columns]:
        axes.set_ylabel("SNR, dB")
    panels[0].margins(x=0.03)  # room for markers
    panels[0].xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    panels[0].xaxis.set_major_formatter(lambda value, _: amount(value))
    limits(panels[0].set_ylim, seen)
