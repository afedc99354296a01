"""Plot the quantization error of a run's operands: a panel for each operand of each GEMM, layers by iterations.

    python tools/plot_quantization.py runs/gpt_tiny-mxfp4_rht_sr

reads quantization.jsonl in that folder, which --log-quantization-interval writes, writes quantization.png and prints
the operands with the lowest SNR in the last logged iteration. --what selects another quantity, for both; its figure is
quantization-WHAT.png. The experts of a layer are one line, the worst of them.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.report.operand_plots import OF_OUTPUTS, QUANTITIES, draw, value_of
from megatron_lowprec.report.operands import (
    Row,
    full_name,
    not_finite,
    read_own_rows,
    read_rows,
)
from megatron_lowprec.training.config.paths import output_file

_SHOWN = 5
_ALWAYS_PRINTED = ("snr", "bias", "underflow", "saturation")


def summary(rows: Sequence[Row], what: str) -> list[str]:
    """Lines about the non-finite operands of the last iteration, and those with the worst values of a quantity."""
    last = max(row["iteration"] for row in rows)
    of_last = [row for row in rows if row["iteration"] == last]
    known, bad = [row for row in of_last if not math.isnan(value_of(row, what))], not_finite(of_last)
    worst = sorted(known, key=lambda row: QUANTITIES[what].rank(value_of(row, what)))[:_SHOWN]
    lines = [f"iteration {last}, {len(of_last)} operands; the worst by {QUANTITIES[what].title}:"]
    if bad:
        lines.insert(0, f"not finite: {len(bad)} of {len(of_last)} operands, first {full_name(bad[0])}")
    names = [", ".join(filter(None, (full_name(row), row["format"]))) for row in worst]  # outputs have no format
    return lines + [f"  {name}: {_texts(row, what)}" for name, row in zip(names, worst, strict=True)]


def _texts(row: Row, what: str) -> str:
    """The quantity, then the others that a row of every kind has."""
    names = dict.fromkeys((what, *_ALWAYS_PRINTED))
    values = {name: value_of(row, name) for name in names}
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


if __name__ == "__main__":
    sys.exit(main())
