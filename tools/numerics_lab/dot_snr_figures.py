"""Histograms of ``dot_snr``: the products' own SNR, panel by panel as in the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_lowprec.report.plot_style import LIGHT, styles

# The study's histograms, a line of panels each: names of the curves.
_SCALES = ("E4M3, no scale", "E4M3, scale 64", "E4M3, scale a vector")
_PROMOTIONS = ("14 bits rounded, never", "14 bits rounded, 512", "14 bits rounded, 128")
_BLOCKS = ("E4M3, scale a vector", "E4M3, blocks of 512", "E4M3, blocks of 128")
_BINS = np.arange(-40.0, 102.5, 5.0)

Samples = Mapping[tuple[str, int, float], torch.Tensor]


def histograms(samples: Samples, lengths: Sequence[int], length: int) -> bytes:
    """PNG: counts of products by their SNR, lines and columns of panels as in the study."""
    three = (lengths[0], lengths[len(lengths) // 2 - 1], length)  # 128, 1024, 4096
    correlations = (0.0, 0.5, 0.9)
    lines: list[tuple[str, list[tuple[str, list[tuple[str, torch.Tensor]]]]]] = [
        (title, [(f"length {each}", [(name, samples[name, each, 0.0]) for name in names]) for each in three])
        for title, names in (("scale", _SCALES), ("accumulator", _PROMOTIONS), ("blocks", _BLOCKS))
    ]
    by_correlation = [
        (f"length {each}", [(f"{_SCALES[1]}, correlation {c}", samples[_SCALES[1], each, c]) for c in correlations])
        for each in three
    ]
    lines.append(("correlation", by_correlation))
    lines += [
        (
            title,
            [
                (f"correlation {c}, {length}", [(name, samples[name, length, c]) for name in names])
                for c in (0.2, 0.5, 0.9)
            ],
        )
        for title, names in (("accumulator", _PROMOTIONS), ("blocks", _BLOCKS))
    ]
    figure = LIGHT.new_figure(11.5)
    panels = figure.subplots(len(lines), 3, sharex=True, squeeze=False)
    for of_line, (compared, cases) in zip(panels, lines):
        style = styles([name for name, _ in cases[0][1]], "")
        for axes, (title, series) in zip(of_line, cases):
            LIGHT.plain(axes)
            axes.set_title(title, loc="left", fontsize=8.5)
            for name, values in series:
                finite = np.clip(values.numpy(), _BINS[0], _BINS[-1])
                counts = np.histogram(finite, _BINS)[0]
                axes.stairs(counts, _BINS, color=style[name].paint(LIGHT), linewidth=1.2, label=name)
            axes.axvline(0.0, color=LIGHT.muted, linewidth=0.6)
        of_line[0].legend(fontsize=5.5, frameon=False, loc="upper right")
        of_line[0].set_ylabel(f"{compared}\nproducts")
    for axes in panels[-1]:
        axes.set_xlabel("SNR, dB")
    return LIGHT.png(figure)
