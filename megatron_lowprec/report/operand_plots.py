"""Figures of the operands' quantization error during training: their SNR over iterations, and maps of a quantity."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_lowprec.report.amounts import amount
from megatron_lowprec.report.operands import KINDS, OUTPUTS, Kind, Row, Snapshots, median
from megatron_lowprec.report.plot_style import NOT_FINISHED, Style, Theme, band, limits, literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Quantity(NamedTuple):
    """A quantity to plot: title, colormap, a rank that is lowest for the worst value, and how a value is printed."""

    title: str
    colors: str
    rank: Callable[[float], float]
    text: str


def _largest(value: float) -> float:
    return -abs(value)


QUANTITIES = {
    "snr": Quantity("signal-to-noise ratio, dB", "viridis", float, "SNR {:.1f} dB"),
    "bias": Quantity("bias", "PuOr", _largest, "bias {:+.2e}"),
    "underflow": Quantity("share of nonzero entries that become 0", "magma_r", _largest, "underflow {:.2%}"),
    "saturation": Quantity("share of entries beyond the largest value", "magma_r", _largest, "saturation {:.2%}"),
    "gradient_to_noise": Quantity(
        "gradient-to-noise ratio of the weight gradient", "viridis", float, "gradient to noise {:.2f}"
    ),
    "amax": Quantity("log2 of the largest magnitude", "cividis", lambda value: -value, "log2 of amax {:.1f}"),
}
OF_OUTPUTS = "gradient_to_noise"
"""The quantity of GEMM outputs only."""
_COLUMNS = 2  # operands of a GEMM, side by side
_MARKED = 12  # most points with a marker each
_TEXT = "#333333"


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


def table(rows: Sequence[Row], kind: Kind, what: str, linears: Sequence[str], iterations: Sequence[int]) -> np.ndarray:
    """[linears, iterations] of one operand, the worst of experts; NaN for missing or non-finite values."""
    rank = QUANTITIES[what].rank
    spoiled = set()
    found = np.full((len(linears), len(iterations)), math.nan)
    line = {linear: at for at, linear in enumerate(linears)}
    column = {iteration: at for at, iteration in enumerate(iterations)}
    for row in rows:
        if (row["gemm"], row["operand"]) == kind:
            value = value_of(row, what)
            at = line[_without_expert(row["linear"])], column[row["iteration"]]
            if row["amax"] is None:
                spoiled.add(at)
            if math.isnan(found[at]) or rank(value) < rank(found[at]):
                found[at] = value
            if at in spoiled:
                found[at] = math.nan
    return found


def draw(title: str, rows: Sequence[Row], what: str) -> bytes:
    """PNG: a panel for each operand or output of the rows."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    linears = list(dict.fromkeys(_without_expert(row["linear"]) for row in rows))
    iterations = sorted({row["iteration"] for row in rows})
    present = {(row["gemm"], row["operand"]) for row in rows if row.get(what) is not None}
    kinds = [kind for kind in (*KINDS, *OUTPUTS) if kind in present]
    tables = {kind: table(rows, kind, what, linears, iterations) for kind in kinds}
    finite = np.concatenate([values[np.isfinite(values)] for values in tables.values()])
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if what == "bias":
        high = max(abs(low), abs(high))
        low = -high
    columns = {1: 1, 2: 2, 4: 2}.get(len(kinds), 3)
    lines = -(-len(kinds) // columns)
    height = min(14.0, 1.4 + lines * max(1.8, 0.16 * len(linears)))
    figure = Figure(figsize=(3.2 * columns + 2.6, height), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.06))
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    image = None
    for axes, kind in zip(panels.flat, kinds, strict=False):
        image = axes.imshow(
            tables[kind], aspect="auto", interpolation="nearest", cmap=QUANTITIES[what].colors, vmin=low, vmax=high
        )
        axes.set_title(" ".join(kind), loc="left", fontsize=9, color=_TEXT)
        axes.tick_params(colors=_TEXT, labelsize=6.5, length=0)
        axes.spines[:].set_visible(False)
        every = -(-len(iterations) // 6)
        axes.set_xticks(range(0, len(iterations), every), [str(iteration) for iteration in iterations[::every]])
        every = -(-len(linears) // 48)
        axes.set_yticks(
            range(0, len(linears), every), [literal(name.removeprefix("layers.")) for name in linears[::every]]
        )
    for axes in panels.flat[len(kinds) :]:
        axes.set_visible(False)
    figure.suptitle(literal(title), fontsize=11, color=_TEXT)
    figure.supxlabel("iteration", fontsize=9, color=_TEXT)
    assert image is not None
    bar = figure.colorbar(image, ax=panels, shrink=0.8)
    bar.set_label(QUANTITIES[what].title, fontsize=9, color=_TEXT)
    bar.ax.tick_params(labelsize=7, colors=_TEXT)
    bar.outline.set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def value_of(row: Row, what: str) -> float:
    """A quantity of a row as it is drawn; NaN without one."""
    value = row.get(what)
    if value is None:
        return math.nan
    if what == "amax":
        return math.log2(value) if value > 0 else math.nan
    return float(value)


def _without_expert(linear: str) -> str:
    return str(linear).split(" of expert ")[0]
