"""Plain figures of the experiments, in the style of the reports."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_lowprec.report.plot_style import LIGHT, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One panel: title, axis labels, lines label -> (x, y); ``log_x`` is the base of a logarithmic axis."""

    title: str
    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: int | None = None
    log_y: bool = False


def line_panels(panels: Sequence[Panel], reference: str = "") -> bytes:
    """PNG: panels below each other; a label has one color in all of them, ``reference`` is gray."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    style = styles(labels, reference)
    figure = LIGHT.new_figure(0.7 + 2.3 * len(panels))
    all_axes: list[Axes] = list(figure.subplots(len(panels), 1, squeeze=False)[:, 0])
    for axes, panel in zip(all_axes, panels):
        LIGHT.plain(axes)
        for label, (x, y) in panel.lines.items():
            of_line = style[label]
            marks: dict[str, Any] = {"marker": of_line.marker, "markersize": 3} if len(x) < 20 else {}
            paint = of_line.paint(LIGHT)
            axes.plot(x, y, color=paint, linestyle=of_line.dashes, linewidth=1.3, label=label, **marks)
        axes.set_title(panel.title, loc="left", fontsize=9.5)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(panel.y)
        if panel.log_x is not None:
            axes.set_xscale("log", base=panel.log_x)
        if panel.log_y:
            axes.set_yscale("log")
    LIGHT.legend(figure, all_axes)
    return small_png(figure)


def grouped_bars(panels: Sequence[tuple[str, Mapping[str, float]]], label: str) -> bytes:
    """PNG: a panel of horizontal bars for each (title, name -> value), with common names."""
    names = list(panels[0][1])
    figure = LIGHT.new_figure(0.8 + 0.24 * len(names))
    all_axes: list[Axes] = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    for axes, (title, values) in zip(all_axes, panels):
        LIGHT.plain(axes)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=LIGHT.grid, linewidth=0.8)
        axes.barh(range(len(names)), [values[name] for name in names], color="#0072b2", height=0.6)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", labelsize=6.5)
        axes.set_title(title, loc="left", fontsize=9.5)
        axes.set_xlabel(label)
    all_axes[0].invert_yaxis()
    return small_png(figure)


def small_png(figure: Figure) -> bytes:
    """The figure as PNG bytes of 64 colors, since results keep figures in the repository."""
    from PIL import Image

    output = io.BytesIO()
    image = Image.open(io.BytesIO(LIGHT.png(figure))).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(output, format="PNG", optimize=True)
    return output.getvalue()
