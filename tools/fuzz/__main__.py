"""Give every reader of the repository damaged and hostile files: it must read or refuse each, in one line.

    python -m tools.fuzz --mutations 500 --out docs/results/fuzz.md
    python -m tools.fuzz --only "corpus" --number 17

A fault is another exception, a crash, code of the file that runs, an escape sequence in the output, or no answer. Each
mutation follows from --seed, the reader and its number. The exit code is 1 after a fault.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.text_tables import markdown_table
from megatron_lowprec.training.config.paths import output_file
from megatron_lowprec.training.monitoring.run_metadata import commit
from tools.fuzz.run import Result, all_results

COLUMNS = ("reader", "mutations", "read", "refused in a line", "faults")


def page(results: Sequence[Result], command: str) -> str:
    """The results page."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows = [[r.name, str(r.mutations), str(r.read), str(r.refused), str(len(r.faults))] for r in results]
    total = [sum(int(row[at]) for row in rows) for at in range(1, 5)]
    faults = [f"- {result.name}: {fault}" for result in results for fault in result.faults]
    return "\n".join(
        [
            "# Fuzz of the readers",
            "",
            f"`{command}` on {date} at commit {commit('tools') or 'unknown'}: every reader of the "
            "repository on damaged and hostile copies of small files. A mutation flips bits, puts in words or numbers "
            "that have ended programs, cuts, repeats, reorders, fills with zeros, or puts another file in the place. "
            "A reader must read a file or refuse it in one printable line. A fault is any other exception, a crash, "
            "code of the file that runs, an escape sequence in the output, or no answer within a minute; under a "
            "checksum also a file that is accepted. The machine has no part in the outcome.",
            "",
            *markdown_table(COLUMNS, [*rows, ["all", *map(str, total)]], ["reader"]),
            "",
            *(["Faults:", "", *faults, ""] if faults else []),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--mutations", type=int, default=500, help="of each reader's files (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="of the mutations (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="readers whose names have one of these in them")
    parser.add_argument("--number", type=int, help="only the mutation of that number")
    parser.add_argument("--folder", type=Path, help="where the small run is, or is kept (default: temporary)")
    parser.add_argument("--out", type=output_file, metavar="FILE.md", help="write the results page")
    args = parser.parse_args(argv)

    def fuzz() -> int:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch  # noqa: F401 - before the fork

        from tools.fuzz.readers import readers
        from tools.fuzz.template import template

        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            chosen = readers(template(args.folder or Path(scratch, "made")))
            chosen = [one for one in chosen if not args.only or any(name in one.name for name in args.only)]
            if not chosen:
                raise UserError(f"--only {' '.join(args.only)}: no reader has that in its name")
            results = []
            for result in all_results(chosen, Path(scratch, "work"), args.mutations, args.seed, args.number):
                results.append(result)
                print(
                    f"{result.name}: {result.read} read, {result.refused} refused, {len(result.faults)} faults",
                    *result.faults,
                    sep="\n    ",
                    flush=True,
                )
        if args.out is not None:
            args.out.write_text(page(results, " ".join(["python -m tools.fuzz", *argv])), encoding="utf-8")
        return int(any(result.faults for result in results))

    return run_tool(parser.prog, fuzz)


if __name__ == "__main__":
    sys.exit(main())
