"""Turn runs into evidence: curves, gaps to bf16 with their uncertainty, and a verdict on each published claim.

    megatron-lowprec report runs/sweeps/paper_table2-small --out reports/table2
    megatron-lowprec report runs/gpt_25m-bf16 'runs/gpt_25m-mxfp4*' --out reports/mxfp4
    megatron-lowprec report runs/sweeps/paper_table2-small --out reports/table2 --archive table2.safetensors.xz
    megatron-lowprec report table2.safetensors.xz --out reports/again

takes run folders of pretrain_gpt.py, folders that hold a sweep.json, archives of them, and patterns, and writes one
HTML file that opens anywhere, with its figures as PNG beside it. docs/guide/report.md has the rules.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.report.archives.packing import write_archive
from megatron_lowprec.report.build import build
from megatron_lowprec.report.claims import BF16, CLAIMS, load_claims
from megatron_lowprec.report.published.ladder import read_ladder
from megatron_lowprec.report.runs import find_runs
from megatron_lowprec.shipped import SHIPPED, find

PUBLISHED = SHIPPED / "data" / "quartet2-runs.csv"


def main(arguments: Sequence[str] | None = None, program: str = "report.py") -> int:
    """Run the tool; the exit code, 2 for what the user can mend."""
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUNS", help="folder of a run or of a sweep, an archive, or a quoted pattern"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the report goes")
    parser.add_argument(
        "--archive", type=Path, metavar="FILE.safetensors.xz", help="also write what reports read of all runs"
    )
    parser.add_argument("--claims", type=find, default=CLAIMS, metavar="FILE", help="default: configs/claims.yaml")
    parser.add_argument("--no-claims", action="store_true", help="gaps and intervals only, nothing on claims of papers")
    parser.add_argument("--reference", default=BF16, metavar="LABEL", help=f"what gaps are to; default: {BF16}")
    parser.add_argument(
        "--published",
        type=find,
        default=PUBLISHED if PUBLISHED.is_file() else None,
        metavar="FILE",
        help="published runs beside comparable recipes; default: the shipped quartet2-runs.csv",
    )
    parser.add_argument("--title", help="default: the sweeps' names, or else the models'")
    args = parser.parse_args(arguments)
    return run_tool(program, lambda: _report(args))


def _report(args: argparse.Namespace) -> None:
    claims = load_claims(args.claims)
    if args.no_claims:
        claims = replace(claims, claims=())
    try:
        with tempfile.TemporaryDirectory(prefix="report-") as scratch:
            runs, notes = find_runs(args.runs, claims.rules.diverged_rise, Path(scratch))
            names = dict.fromkeys(run.sweep or run.model for run in runs)
            title = args.title or f"Report: {', '.join(names)}"
            published = [] if args.published is None else read_ladder(args.published)
            report = build(runs, notes, claims, args.reference, title, published)
            lines = [*report.lines(), "", f"report: {report.write(args.out)}"]
            if args.archive is not None:
                write_archive(args.archive, runs, lambda _: None)  # the report has named dropped rows
                lines.append(f"archive: {args.archive}")
    except OSError as error:
        raise UserError(str(error)) from None
    print("\n".join(lines))
