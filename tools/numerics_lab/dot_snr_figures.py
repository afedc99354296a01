"""Histograms of ``dot_snr``: the products' own SNR, panel by panel as in the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_lowprec.report.plot_style import LIGHT, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The study's histograms, a line of panels each: names of the curves.
_SCALES = ("E4M3, no scale", "E4M3, scale 64", "E4M3, scale a vector")
_PROMOTIONS = ("14 bits rounded, never", "14 bits rounded, 512", "14 bits rounded, 128")
_BLOCKS = ("E4M3, scale a vector", "E4M3, blocks of 512", "E4M3, blocks of 128")
_BINS = np.arange(-40.0, 102.5, 5.0)

Case = tuple[str, int, float]
"""Scheme or accumulator, length, correlation."""


def histograms(samples: Mapping[Case, torch.Tensor], lengths: Sequence[int], length: int) -> bytes:
    """PNG: counts of products by their SNR in dB, a line of panels for each thing that is compared.

    Args:
        samples: SNR of the products of a case.
        lengths: the first and the one before the middle are shown, at correlation 0.
        length: shown at correlation 0, and alone at others.
    """
    shown, correlations = (lengths[0], lengths[len(lengths) // 2 - 1], length), (0.2, 0.5, 0.9)
    lines: list[tuple[str, list[list[Case]]]] = [
        ("scale", [[(name, each, 0.0) for name in _SCALES] for each in shown]),
        ("accumulator", [[(name, each, 0.0) for name in _PROMOTIONS] for each in shown]),
        ("blocks", [[(name, each, 0.0) for name in _BLOCKS] for each in shown]),
        ("correlation", [[(_SCALES[1], each, correlation) for correlation in (0.0, 0.5, 0.9)] for each in shown]),
        ("accumulator", [[(name, length, correlation) for name in _PROMOTIONS] for correlation in correlations]),
        ("blocks", [[(name, length, correlation) for name in _BLOCKS] for correlation in correlations]),
    ]
    figure = LIGHT.new_figure(11.5)
    panels = figure.subplots(len(lines), 3, sharex=True, squeeze=False)
    for of_line, (compared, panels_of_line) in zip(panels, lines):
        for axes, cases in zip(of_line, panels_of_line):
            _panel(
                axes, {case: samples[case] for case in cases}, "correlation" if compared == "correlation" else "name"
            )
        of_line[0].legend(fontsize=5.5, frameon=False, loc="upper right")
        of_line[0].set_ylabel(f"{compared}\nproducts")
    for axes in panels[-1]:
        axes.set_xlabel("SNR, dB")
    return LIGHT.png(figure)


def _panel(axes: Axes, samples: Mapping[Case, torch.Tensor], label: str) -> None:
    """One panel; its curves differ in ``label``, and its title has what they share."""
    labels = [name if label == "name" else f"{name}, correlation {correlation}" for name, _, correlation in samples]
    style = styles(labels, "")
    LIGHT.plain(axes)
    _, length, correlation = next(iter(samples))
    title = f"length {length}" if label == "correlation" else f"length {length}, correlation {correlation}"
    axes.set_title(title, loc="left", fontsize=8)
    for name, values in zip(labels, samples.values()):
        counts = np.histogram(values.clamp(_BINS[0], _BINS[-1]).numpy(), _BINS)[0]
        axes.stairs(counts, _BINS, color=style[name].paint(LIGHT), linewidth=1.2, label=name)
    axes.axvline(0.0, color=LIGHT.muted, linewidth=0.6)
