"""Steps and memory of training runs, from the logs of this driver and of Megatron-LM, as JSON for a results page:

    python tools/run_logs.py FOLDER --sequence 8192 --gpus 2 --baseline bf16 --out docs/results/llama3-8b.json

Each FOLDER/NAME.log is a run; one without iterations is named and has no row. Its time is the median over iterations
from --first on, one that is captured in CUDA graphs or compiled later than that among them.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_lowprec.errors import Parser, UserError, run_tool
from megatron_lowprec.training.config.paths import output_file

MS = "elapsed time per iteration (ms)"
_BATCH = "global batch size"
_NUMBER = re.compile(r"iteration +(\d+)/")
_NAMES = {
    "iteration": "iteration",
    "samples": "consumed samples",
    "ms": MS,
    "tflops": "throughput per GPU (TFLOP/s/GPU)",
    "loss": "lm loss",
    "grad_norm": "grad norm",
}
_PEAKS = re.compile(r"memory: ([\d.]+) GiB allocated at most"), re.compile(r"max allocated: ([\d.]+)")  # GiB, MiB
_PLANNED = re.compile(r"memory: ([\d.]+) GiB planned")


def main(argv: Sequence[str] | None = None) -> int:
    """Write --out; exit code 2: no iterations of the baseline."""
    parser = Parser(prog="run_logs.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with a NAME.log a run, and the folder NAME of a run of this driver")
    parser.add_argument("--sequence", type=int, required=True, help="tokens of a sample")
    parser.add_argument("--gpus", type=int, required=True, help="processes of a run")
    parser.add_argument("--baseline", required=True, metavar="NAME", help="the run that times and peaks are divided by")
    parser.add_argument("--first", type=int, default=2, help="iteration from which steps count (default: %(default)s)")
    parser.add_argument("--out", type=output_file, required=True, metavar="FILE.json", help="file to write")
    args = parser.parse_args(argv)
    return run_tool("run_logs.py", lambda: write(args))


def write(args: argparse.Namespace) -> None:
    """A row a log, in the form of tools.bench's files, and what this driver wrote beside."""
    logs = sorted(args.folder.glob("*.log"), key=lambda log: log.stem.lower())
    rows = {log.stem: row for log in logs if (row := row_of(log, args)) is not None}
    if args.baseline not in rows:
        raise UserError(f"--baseline {args.baseline}: {args.folder} has iterations of {', '.join(rows) or 'no run'}")
    base = rows[args.baseline]
    for row in rows.values():
        row["over_bf16"] = row["ms"] / base["ms"]
        row["peak_over_bf16"] = row["peak_gib"] / base["peak_gib"] if row["peak_gib"] and base["peak_gib"] else None
    runs = {log.stem: run_of(log.with_suffix("")) for log in logs if (log.with_suffix("") / "run.json").exists()}
    content = {"tables": [{"title": "steps of whole runs", "rows": list(rows.values())}], "runs": runs}
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def row_of(log: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """A run's median step, ms, with the smallest and largest; rates per GPU; memory in GiB, None where no line has it.

    None, and a line about it, for a log without iterations from --first on.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in iteration_lines(text) if line.keys() >= {*_NAMES.values(), _BATCH}]
    iterations = [{key: float(line[name]) for key, name in _NAMES.items()} for line in lines]
    batches = [float(line[_BATCH]) for line in lines]
    counted = [
        (each, batch) for each, batch in zip(iterations, batches, strict=True) if each["iteration"] >= args.first
    ]
    ms = [each["ms"] for each, _ in counted]
    if not ms:
        print(f"{log}: left out, {len(iterations)} iterations and none from --first {args.first} on", file=sys.stderr)
        return None
    ours, stock = (max(map(float, pattern.findall(text)), default=None) for pattern in _PEAKS)
    planned = _PLANNED.search(text)
    samples = batches[-1]
    per_samples = median(each["ms"] * (samples / batch) for each, batch in counted)  # the batch may change in a log
    return {
        "variant": log.stem,
        "ms": median(ms),
        "low": min(ms),
        "high": max(ms),
        "tflops": median(each["tflops"] for each, _ in counted),
        "tokens_s": samples * args.sequence / args.gpus / per_samples * 1e3,
        "peak_gib": ours or (stock and stock / 1024),
        "planned_gib": planned and float(planned[1]),
        "iterations": iterations,
    }


def iteration_lines(text: str) -> list[dict[str, str]]:
    """Lines of iterations in a log of this driver or of Megatron-LM, which have one form.

    Each has its values by their names in the log, "iteration", and the whole "line".
    """
    found = []
    for line in text.splitlines():
        number = _NUMBER.search(line)
        if number is not None and f"{MS}:" in line:
            parts = (part.partition(": ") for part in line.split("|"))
            values = {name.strip(): value.strip() for name, colon, value in parts if colon}
            found.append({**values, "iteration": number[1], "line": line})
    return found


def run_of(folder: Path) -> dict[str, Any]:
    """A run's record, and its metrics in all digits."""
    metrics = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "run": json.loads((folder / "run.json").read_text(encoding="utf-8")),
        "metrics": [json.loads(line) for line in metrics],
    }


if __name__ == "__main__":
    sys.exit(main())
