"""Plot the quantization error of a run's operands: a panel for each operand of each GEMM, layers by iterations.

    python tools/plot_quantization.py runs/gpt_tiny-mxfp4_rht_sr

reads quantization.jsonl in that folder, which --log-quantization-interval writes, writes quantization.png and prints
the operands with the lowest SNR in the last logged iteration. --what selects another quantity, for both; its figure is
quantization-WHAT.png. The experts of a layer are one line, the worst of them.
"""

import io
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.report.operands import (
    KINDS,
    OUTPUTS,
    Kind,
    Row,
    full_name,
    not_finite,
    read_own_rows,
    read_rows,
)
from megatron_lowprec.report.plot_style import literal
from megatron_lowprec.training.config.paths import output_file


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
_SHOWN = 5
_ALWAYS_PRINTED = ("snr", "bias", "underflow", "saturation")
_TEXT = "#333333"


def table(rows: Sequence[Row], kind: Kind, what: str, linears: Sequence[str], iterations: Sequence[int]) -> np.ndarray:
    """[linears, iterations] of one operand, the worst of experts; NaN for missing or non-finite values."""
    rank = QUANTITIES[what].rank
    spoiled = set()
    found = np.full((len(linears), len(iterations)), math.nan)
    line = {linear: at for at, linear in enumerate(linears)}
    column = {iteration: at for at, iteration in enumerate(iterations)}
    for row in rows:
        if (row["gemm"], row["operand"]) == kind:
            value = _value(row, what)
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


def summary(rows: Sequence[Row], what: str) -> list[str]:
    """Lines about the non-finite operands of the last iteration, and those with the worst values of a quantity."""
    last = max(row["iteration"] for row in rows)
    of_last = [row for row in rows if row["iteration"] == last]
    known, bad = [row for row in of_last if not math.isnan(_value(row, what))], not_finite(of_last)
    worst = sorted(known, key=lambda row: QUANTITIES[what].rank(_value(row, what)))[:_SHOWN]
    lines = [f"iteration {last}, {len(of_last)} operands; the worst by {QUANTITIES[what].title}:"]
    if bad:
        lines.insert(0, f"not finite: {len(bad)} of {len(of_last)} operands, first {full_name(bad[0])}")
    names = [", ".join(filter(None, (full_name(row), row["format"]))) for row in worst]  # outputs have no format
    return lines + [f"  {name}: {_texts(row, what)}" for name, row in zip(names, worst, strict=True)]


def _texts(row: Row, what: str) -> str:
    """The quantity, then the others that a row of every kind has."""
    names = dict.fromkeys((what, *_ALWAYS_PRINTED))
    values = {name: _value(row, name) for name in names}
    return ", ".join(QUANTITIES[name].text.format(value) for name, value in values.items() if not math.isnan(value))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a UserError."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder with quantization.jsonl")
    parser.add_argument("--what", choices=QUANTITIES, default="snr", help="quantity to plot (default: snr)")
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="PNG",
        help="default: quantization.png in the folder, quantization-WHAT.png for another quantity than snr",
    )
    args = parser.parse_args(arguments)
    output = args.output or args.run / ("quantization.png" if args.what == "snr" else f"quantization-{args.what}.png")

    def plot() -> None:
        rows = _rows(args.run / "quantization.jsonl", args.what)
        try:
            output.write_bytes(draw(f"{args.run.name}: {QUANTITIES[args.what].title}", rows, args.what))
        except OSError as error:
            raise UserError(f"--output {output}: {error}") from None
        print(*summary(rows, args.what), f"wrote {output}", sep="\n")

    return run_tool("plot_quantization.py", plot)


def _rows(path: Path, what: str) -> list[Row]:
    """The rows of operands, or of outputs that have the quantity; raises UserError without any."""
    rows = read_rows(path, print)
    if what == OF_OUTPUTS:
        rows = [row for row in read_own_rows(path, print) if row.get(what) is not None]
    if not rows and not path.is_file():
        raise UserError(f"{path} does not exist: train with --log-quantization-interval N, and name the run's folder")
    if not rows:
        raise UserError(f"{path} has no rows: the run ended before the first snapshot, or quantizes no operand")
    return rows


def _value(row: Row, what: str) -> float:
    value = row.get(what)
    if value is None:
        return math.nan
    if what == "amax":
        return math.log2(value) if value > 0 else math.nan
    return float(value)


def _without_expert(linear: str) -> str:
    return str(linear).split(" of expert ")[0]


if __name__ == "__main__":
    sys.exit(main())
