"""Train a model for some steps under every recipe, and put the losses into one table.

    python tools/train_recipes.py --steps 50 --processes 1,2 --out recipes.json
    python tools/train_recipes.py --processes 2 --recipes bf16,mxfp8 -- --data-path my_corpus_text_document

What follows ``--`` goes to pretrain_gpt.py as it stands. Each run is a process group of its own; ``--at-once`` of them
share the machine. A run that fails is shown with the end of its output, and the exit code is 1.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_lowprec import recipes
from megatron_lowprec.errors import Parser
from megatron_lowprec.training.config.paths import output_file

REPOSITORY = Path(__file__).resolve().parent.parent
LAST = 10  # steps that the final training loss is the mean of


@dataclass(frozen=True)
class Result:
    """Losses of one run in nats a token; ``error`` is the end of its output where it failed."""

    recipe: str
    processes: int
    first: float | None = None
    last: float | None = None
    validation: float | None = None
    error: str | None = None


def train(recipe: str, processes: int, steps: int, config: str, more: list[str]) -> Result:
    """One run, in a temporary folder that holds nothing but its metrics."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port)]
        options = ["--config", config, "--recipe", recipe, "--train-iters", str(steps), "--eval-interval", str(steps)]
        place = ["--no-save", "--tensorboard-dir", f"{folder}/tensorboard"]
        command = [sys.executable, *launcher, str(REPOSITORY / "pretrain_gpt.py"), *options, *place, *more]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        metrics = Path(folder) / "metrics.jsonl"
        if run.returncode or not metrics.exists():
            return Result(recipe, processes, error=(run.stdout + run.stderr)[-2000:])
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["lm loss"] for row in rows if "lm loss" in row]
    validation = [row["lm loss validation"] for row in rows if "lm loss validation" in row]
    tail = losses[-LAST:]
    return Result(recipe, processes, losses[0], sum(tail) / len(tail), validation[-1] if validation else None)


def _sizes(text: str) -> list[int]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: wants numbers such as 1,2")
    return [int(size) for size in sizes]


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 1 where a run failed."""
    parser = Parser(description=__doc__)
    parser.add_argument("--recipes", default=",".join(recipes()), help="comma-separated; all by default")
    parser.add_argument("--processes", type=_sizes, default=[1], help="sizes of the process group, such as 1,2")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--config", default=str(REPOSITORY / "configs/models/gpt_125m.yaml"))
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the machine")
    parser.add_argument("--out", type=output_file, help="also write the results there, as JSON")
    parser.add_argument("more", nargs="*", help="after --: options of pretrain_gpt.py")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun prints a banner about it
    jobs = [(recipe, size) for size in args.processes for recipe in args.recipes.split(",")]
    results = []
    print("| recipe | processes | first step | last steps | validation |\n| --- | ---: | ---: | ---: | ---: |")
    with ThreadPoolExecutor(args.at_once) as pool:
        for result in pool.map(lambda job: train(job[0], job[1], args.steps, args.config, args.more), jobs):
            results.append(result)
            numbers = (result.first, result.last, result.validation)
            cells = " | ".join("" if number is None else f"{number:.4f}" for number in numbers)
            print(f"| `{result.recipe}` | {result.processes} | {'failed | |' if result.error else cells} |", flush=True)
    for result in results:
        if result.error:
            print(f"\n{result.recipe} on {result.processes} processes:\n{result.error}", file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
