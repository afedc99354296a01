"""The ladder figure: gap to the reference against training tokens per parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_lowprec.report.ladder.gap_points import Line
from megatron_lowprec.report.plot_style import Style, Theme, gap_axis, literal, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.2), (6, 2, 1, 2), (3, 1, 1, 1, 1, 1))  # one per model
_FILLS = ("full", "none", "left", "bottom", "right")  # likewise
_PUBLISHED = "sD^vPX<>ph"  # a marker per line
_LONGEST = 44  # characters of half a legend's width
_SPREAD, _WIDEST = 0.007, 0.06  # of the axis' logarithmic length: between two lines, and between the outermost


def gap_by_tokens(
    measured: Sequence[Line], published: Sequence[Line], reference: str, styles: Mapping[str, Style], theme: Theme
) -> bytes | None:
    """PNG: gaps in nats a token with intervals over tokens per parameter; None without a measured gap.

    Color and marker tell recipes apart, dashes and filling models. Published runs are thin, gray and hollow.
    Measured lines are shifted along the axis against each other, so that intervals at one budget stay apart.
    """
    if not measured:
        return None
    from matplotlib.ticker import LogLocator, NullLocator

    lines = [*published, *measured]
    xs = [point.tokens_per_parameter for line in lines for point in line.points]
    ys = [
        point.gap + sign * (0.0 if math.isnan(point.half_width) else point.half_width)
        for line in lines
        for point in line.points
        for sign in (-1, 1)
    ]
    rows = sum(1 + _name(line).count("\n") for line in lines) / 2
    figure = theme.new_figure(4.0 + 0.19 * math.ceil(rows))
    axes = figure.subplots()
    theme.plain(axes)
    axes.set_xscale("log")
    low, high = min(xs) / 1.4, max(xs) * 1.4
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axhline(0, color=theme.muted, linewidth=1)
    scale = gap_axis(axes, [0.0, *ys])
    models = sorted({_model(line) for line in lines})
    spread = min(_SPREAD, _WIDEST / len(measured))
    for at, line in enumerate(measured):
        shift = (high / low) ** (spread * (at - (len(measured) - 1) / 2))
        style, fill = styles[line.label], _FILLS[models.index(_model(line)) % len(_FILLS)]
        look: dict[str, Any] = {"color": style.paint(theme), "linewidth": 1.5, "elinewidth": 1.3, "markersize": 6.5}
        error = [point.half_width for point in line.points]
        _draw(axes, line, models, shift, yerr=error, marker=style.marker, fillstyle=fill, **look)
    for at, line in enumerate(published):
        look = {"color": theme.muted, "linewidth": 0.8, "markersize": 4.5, "markerfacecolor": "none", "zorder": 1.5}
        _draw(axes, line, models, 1.0, marker=_PUBLISHED[at % len(_PUBLISHED)], **look)
    axes.set_xlabel("training tokens per parameter, without embeddings (log)")
    axes.set_ylabel(f"gap to {literal(reference)}, nats a token {scale}".rstrip())
    theme.legend(figure, [axes])
    return theme.png(figure)


def _model(line: Line) -> tuple[float, str]:
    return line.parameters, line.model


def _name(line: Line) -> str:
    label = wrapped(line.label)
    long = "\n" in label or len(label) + len(line.model) > _LONGEST
    return label + (",\n" if long else ", ") + literal(line.model)


def _draw(axes: Axes, line: Line, models: Sequence[tuple[float, str]], shift: float, **look: Any) -> None:
    x = [shift * point.tokens_per_parameter for point in line.points]
    y = [point.gap for point in line.points]
    dashes = (0, _DASHES[models.index(_model(line)) % len(_DASHES)])
    axes.errorbar(x, y, linestyle=dashes, label=_name(line), **look)
