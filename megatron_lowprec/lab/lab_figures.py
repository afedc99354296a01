"""Plain figures of the experiments, in the style of the reports."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_lowprec.report.plot_style import LIGHT, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Case = tuple[str, int, float]
"""Scheme or accumulator, length, correlation."""

# What each line of the study's panels compares.
_SCALES = ("E4M3, no scale", "E4M3, scale 64", "E4M3, scale a vector")
_PROMOTIONS = ("14 bits rounded, never", "14 bits rounded, 512", "14 bits rounded, 128")
_HOPPER = ("Hopper, never", "Hopper, 512", "Hopper, 128")
_BLOCKS = ("E4M3, scale a vector", "E4M3, blocks of 512", "E4M3, blocks of 128")
_CORRELATIONS = (0.0, 0.5, 0.9)
_BINS = np.arange(-40.0, 102.5, 5.0)


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


def histograms(samples: Mapping[Case, torch.Tensor], lengths: Sequence[int], length: int) -> bytes:
    """PNG: counts of products by their SNR in dB, a line of three panels for each comparison.

    Args:
        samples: SNR of the products of a case.
        lengths: the first and the one before the middle are shown, at correlation 0.
        length: shown at correlation 0, and alone at others.
    """
    shown, correlations = (lengths[0], lengths[len(lengths) // 2 - 1], length), (0.2, 0.5, 0.9)
    lines: list[list[dict[str, Case]]] = [
        *([{name: (name, each, 0.0) for name in names} for each in shown] for names in (_SCALES, _PROMOTIONS, _BLOCKS)),
        [{f"{_SCALES[1]}, correlation {each}": (_SCALES[1], at, each) for each in _CORRELATIONS} for at in shown],
        *(
            [{name: (name, length, each) for name in names} for each in correlations]
            for names in (_PROMOTIONS, _HOPPER, _BLOCKS)
        ),
    ]
    figure = LIGHT.new_figure(2.0 * len(lines))
    for part, panels in zip(figure.subfigures(len(lines), 1, squeeze=False)[:, 0], lines):
        all_axes: list[Axes] = list(part.subplots(1, 3, sharex=True))
        for axes, cases in zip(all_axes, panels):
            _panel(axes, {label: samples[case] for label, case in cases.items()})
            _, at, correlation = next(iter(cases.values()))
            same = len({of_case[2] for of_case in cases.values()}) == 1
            axes.set_title(f"length {at}" + (f", correlation {correlation}" if same else ""), loc="left", fontsize=8)
        all_axes[0].set_ylabel("products")
        all_axes[1].set_xlabel("SNR, dB")
        handles, labels = all_axes[0].get_legend_handles_labels()
        part.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=8)
    return small_png(figure)


def _panel(axes: Axes, samples: Mapping[str, torch.Tensor]) -> None:
    """One panel: a curve for each label."""
    style = styles(list(samples), "")
    LIGHT.plain(axes)
    for label, values in samples.items():
        counts = np.histogram(values.clamp(_BINS[0], _BINS[-1]).numpy(), _BINS)[0]
        axes.stairs(counts, _BINS, color=style[label].paint(LIGHT), linewidth=1.2, label=label)
    axes.axvline(0.0, color=LIGHT.muted, linewidth=0.6)
