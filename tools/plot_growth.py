"""Plot the gradient norms of an archive's runs, and the size of one tensor over their checkpoints.

    python tools/plot_growth.py docs/results/late-growth/runs.safetensors.xz --out growth.png --layer 2 \\
        --weights docs/results/late-growth/weights.json --tensor decoder.layers.self_attention.linear_qkv.bias

A run is named by its folder in the archive. ``--weights`` is a JSON of run -> what tools/weight_norms.py writes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.files import read_json
from megatron_lowprec.report.archives.sources import find_sources
from megatron_lowprec.report.curve import NORM, TRAIN, Series, read_columns
from megatron_lowprec.report.plot_style import LIGHT, styles
from megatron_lowprec.training.config.paths import output_file

WINDOW = 200  # iterations


@dataclass(frozen=True)
class Windows:
    """A run's median gradient norm and mean training loss in nats over ``WINDOW`` iterations, by their last one."""

    norms: dict[int, float]
    losses: dict[int, float]


def windows(archive: Path) -> dict[str, Windows]:
    """Folder of a run -> its windows, in the archive's order."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            (source.root or source.folder, metrics.parent)
            for source in find_sources(str(archive), Path(scratch))
            for metrics in sorted(source.folder.rglob("metrics.jsonl"))
        ]
        columns = {
            str(run.relative_to(root)): read_columns(run / "metrics.jsonl", (NORM, TRAIN), print)
            for root, run in folders
        }
    return {
        name: Windows(_reduced(found[NORM], np.median), _reduced(found[TRAIN], np.mean))
        for name, found in columns.items()
    }


def _reduced(series: Series, reduce: Any) -> dict[int, float]:
    ends = range(WINDOW, int(max(series[0], default=0)) + 1, WINDOW)
    kept = {end: series[1][(series[0] > end - WINDOW) & (series[0] <= end)] for end in ends}
    return {end: float(reduce(values)) for end, values in kept.items() if len(values)}


def _size(tensors: Mapping[str, Any], tensor: str, layer: int) -> float:
    if tensor not in tensors:
        raise UserError(f"--tensor {tensor}: not among the weights; name one of {', '.join(tensors)}")
    sizes: list[float] = tensors[tensor]["rms"]
    if not 1 <= layer <= len(sizes):
        raise UserError(f"--layer {layer}: {tensor} has sizes of {len(sizes)} layers; give one from 1 to {len(sizes)}")
    return sizes[layer - 1]


def draw(found: Mapping[str, Windows], weights: Mapping[str, Any], tensor: str, layer: int) -> bytes:
    """The figure as PNG.

    Raises:
        UserError: the weights of a run have no such tensor or layer.
    """
    style = styles(list(found), next(iter(found)))
    figure = LIGHT.new_figure(4.2)
    left, right = figure.subplots(1, 2)
    for name, run in found.items():
        paint = {"color": style[name].paint(LIGHT), "linestyle": style[name].dashes, "linewidth": 1.5}
        left.plot(list(run.norms), list(run.norms.values()), label=name.replace("gpt_3m-", ""), **paint)
        if name in weights:
            sizes = {int(at): _size(tensors, tensor, layer) for at, tensors in weights[name].items()}
            right.plot(list(sizes), list(sizes.values()), marker=style[name].marker, markersize=3.5, **paint)
    left.set_yscale("log")
    left.set_title(f"gradient norm, median of {WINDOW} iterations", fontsize=8.5, color=LIGHT.text)
    right.set_title(
        f"rms of {tensor.rpartition('.')[0].rpartition('.')[2]}'s {tensor.rpartition('.')[2]}, layer {layer}",
        fontsize=8.5,
        color=LIGHT.text,
    )
    for axes in (left, right):
        LIGHT.plain(axes)
        axes.set_xlabel("iteration")
    LIGHT.legend(figure, [left])
    return LIGHT.png(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a UserError."""
    parser = Parser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tensor", required=True, help="its name in the checkpoint")
    parser.add_argument("--layer", type=int, required=True, help="from 1")
    parser.add_argument("--out", type=output_file, required=True, metavar="PNG")
    args = parser.parse_args(argv)

    def plot() -> int:
        try:
            weights = read_json(args.weights, "write it anew with tools/weight_norms.py")
        except FileNotFoundError:
            raise UserError(f"--weights {args.weights}: no such file; tools/weight_norms.py writes it") from None
        args.out.write_bytes(draw(windows(args.archive), weights, args.tensor, args.layer))
        return 0

    return run_tool("plot_growth.py", plot)


if __name__ == "__main__":
    sys.exit(main())
