"""Histograms of ``dot_snr``: the products' own SNR, panel by panel as in the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_lowprec.report.plot_style import LIGHT, styles
from tools.numerics_lab.figures import small_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Case = tuple[str, int, float]
"""Scheme or accumulator, length, correlation."""

# What each line of the study's panels compares.
_SCALES = ("E4M3, no scale", "E4M3, scale 64", "E4M3, scale a vector")
_PROMOTIONS = ("14 bits rounded, never", "14 bits rounded, 512", "14 bits rounded, 128")
_HOPPER = ("Hopper, never", "Hopper, 512", "Hopper, 128")
_BLOCKS = ("E4M3, scale a vector", "E4M3, blocks of 512", "E4M3, blocks of 128")
_CORRELATIONS = (0.0, 0.5, 0.9)
_BINS = np.arange(-40.0, 102.5, 5.0)


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
