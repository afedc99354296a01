"""Style of a report's figures: themes, a color per recipe, plain axes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 6.6  # inches: 9-point text is then readable on a phone

_COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #8c564b #9467bd #7a9a01 #17a2b8 #b22222 #c9a400"
_PALETTE = _COLORS.split()
_USUAL = {"mxfp4_rht_sr": 0, "mxfp4": 1, "mxfp4_sr": 2, "mxfp4_rht": 4, "mxfp8": 9, "mxfp8_ocp": 10}
_DASHES: tuple[tuple[float, ...], ...] = ((), (4, 2), (1, 1), (6, 2, 1, 2))  # for labels that share a color
_MARKERS = "osD^vPXd<>hp"

_LINEAR = 0.02  # nats; the linear part of an axis of gaps

NOT_FINISHED = (0, (1.0, 1.5))
"""Line style of a run that did not finish."""


@dataclass(frozen=True)
class Theme:
    """Colors of everything except the curves, and how far curves are lightened for contrast."""

    text: str
    muted: str
    grid: str
    background: str
    lift: float

    def new_figure(self, height: float) -> Figure:
        """A figure of the report's width; ``height`` in inches."""
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        return Figure(figsize=(_WIDTH, height), dpi=160, layout=layout, facecolor=self.background)

    def plain(self, axes: Axes) -> None:
        """Axes with a horizontal grid and without a frame."""
        axes.set_facecolor(self.background)
        axes.margins(x=0.01)
        axes.grid(axis="y", color=self.grid, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(self.muted)
        axes.tick_params(labelsize=9, color=self.muted, labelcolor=self.text)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set_color(self.text)
            axis.label.set_fontsize(9.5)

    def legend(self, figure: Figure, panels: Sequence[Axes]) -> None:
        """Legend below the figure with every label of the panels once."""
        entries = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
        columns = 2 if max(map(len, entries), default=0) > 20 else 3
        options: dict[str, Any] = {"frameon": False, "labelcolor": self.text, "fontsize": 9}
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, **options)

    def png(self, figure: Figure) -> bytes:
        """The figure as PNG bytes."""
        output = io.BytesIO()
        figure.savefig(output, format="png", facecolor=self.background)
        return output.getvalue()


LIGHT = Theme("#1f2328", "#6e7781", "#e4e7eb", "#ffffff", 0.0)
DARK = Theme("#e6edf3", "#9da7b1", "#30363d", "#161b22", 0.3)


@dataclass(frozen=True)
class Style:
    """Line style of a label, the same in every figure of a report."""

    color: str | None
    marker: str
    dashes: tuple[int, tuple[float, ...]]

    def paint(self, theme: Theme) -> str:
        """The line color; the reference has the theme's gray."""
        if self.color is None:
            return theme.muted
        parts = (int(self.color[at : at + 2], 16) for at in (1, 3, 5))
        return "#" + "".join(f"{round(part + theme.lift * (255 - part)):02x}" for part in parts)


def styles(labels: Sequence[str], reference: str) -> dict[str, Style]:
    """A color per label: fixed for the best-known recipes, the next free one for others."""
    taken = {_USUAL[label] for label in labels if label in _USUAL}
    free = [at for at in range(len(_PALETTE)) if at not in taken] or list(range(len(_PALETTE)))
    found = {}
    others = 0
    for at, label in enumerate(labels):
        dashes: tuple[int, tuple[float, ...]] = (0, ())
        if label == reference:
            found[label] = Style(None, "o", dashes)
            continue
        if label in _USUAL:
            color = _USUAL[label]
        else:
            color = free[others % len(free)]
            dashes = (0, _DASHES[min(others // len(free), len(_DASHES) - 1)])
            others += 1
        found[label] = Style(_PALETTE[color], _MARKERS[(at + 1) % len(_MARKERS)], dashes)
    return found


def limits(setter: Callable[[float, float], object], values: Sequence[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    margin = 0.08 * (high - low) or 0.01
    setter(low - margin, high + margin)


def gap_axis(axes: Axes, gaps: Sequence[float]) -> str:
    """Vertical scale and limits for these gaps in nats; returns what the label must say of the scale.

    Large gaps are drawn logarithmically, so that one does not squeeze the others.
    """
    if max(map(abs, gaps)) <= 2 * _LINEAR:
        limits(axes.set_ylim, gaps)
        return ""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_yscale("symlog", linthresh=_LINEAR, linscale=1.5)
    axes.set_ylim(min(1.3 * min(gaps), -_LINEAR / 2), max(1.3 * max(gaps), _LINEAR / 2))
    ticks = [_LINEAR / 2, *(digit * 10.0**power for power in range(-2, 3) for digit in (2, 5, 10))]
    axes.yaxis.set_major_locator(FixedLocator([0.0, *ticks, *(-tick for tick in ticks)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    return f"(log beyond {_LINEAR:g})"


def band(
    axes: Axes,
    x: np.ndarray,
    middle: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray] | None,
    style: Style,
    theme: Theme,
    label: str,
    markers: bool,
) -> None:
    """A line, with the range around it if given."""
    paint = style.paint(theme)
    marks: dict[str, Any] = {"marker": style.marker, "markersize": 4} if markers else {}
    axes.plot(x, middle, color=paint, linewidth=1.5, linestyle=style.dashes, label=wrapped(label), **marks)
    if ends is not None:
        axes.fill_between(x, *ends, color=paint, alpha=0.18, linewidth=0)


def literal(text: str) -> str:
    """Text that matplotlib shows as it is: between two dollar signs it would read, and may refuse, mathematics."""
    return text.replace("$", r"\$")


def wrapped(label: str) -> str:
    """A recipe's label, literal, with a line break before each override."""
    return literal(label.replace("+", "\n+") if len(label) > 24 else label)
