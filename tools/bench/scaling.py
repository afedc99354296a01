"""Weak scaling of a whole training step: data parallel on 1 to N GPUs of this machine, the batch of each the same.

One GPU and N run the same flags: distributed optimizer, gradients reduced under the backward pass, weights gathered
under the forward pass. A step on N GPUs would take as long as on one if communication were free: efficiency is t1 / tN.
"""

import argparse
from statistics import median
from typing import Any

from megatron_lowprec.errors import UserError
from tools.bench.measure import Bench
from tools.bench.report import Report
from tools.bench.shapes import ModelShape, models
from tools.bench.step import COLUMNS as STEP_COLUMNS
from tools.bench.step import in_fresh_process, measured_row
from tools.bench.table import Column, Row

RECIPES = ("bf16", "fp8_delayed")
FLAGS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_OF_A_STEP = {column.key: column for column in STEP_COLUMNS}
COLUMNS = (
    *(_OF_A_STEP[key] for key in ("model", "recipe", "batch")),
    Column("processes", "GPUs", "d"),
    *(_OF_A_STEP[key] for key in ("ms", "low", "high", "noise")),
    Column("efficiency", "t1/tN", ".3f"),
    *(_OF_A_STEP[key] for key in ("tokens_per_second", "peak_gib", "last_loss")),
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Each model under each recipe on each number of GPUs, --rounds times in turn."""
    recipes = list(args.recipes or RECIPES)
    chosen = models(args.shapes or (["345m", "1.3b"] if args.device == "cuda" else ["smoke"]))
    without = [model.name for model in chosen if model.config is None]
    if without:
        raise UserError(f"--models {','.join(without)}: there is no config of it in configs/models; leave it out")
    counts = _counts(args)
    report.note(
        f"data parallel, {' '.join(FLAGS)}; mock data; the batch is each GPU's",
        f"{args.warm_up} iterations before {args.iterations} timed ones, median of rank 0's wall clock, steps one",
        "behind the other; peak: allocated on rank 0; t1/tN: step of the first count of GPUs over this one's",
    )
    rows: list[Row] = []
    for model in chosen:
        for recipe in recipes:
            found: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
            for turn in range(args.rounds):
                for count in counts:
                    result = in_fresh_process(model, [*FLAGS, "--recipe", recipe], args, processes=count)
                    found[count].append(result)
                    said = result.get("failed") or f"{result['ms']:.2f} ms"
                    report.progress(f"{model.name} {recipe} on {count}, round {turn + 1}: {said}")
            rows += [_row(model, recipe, count, found, args) for count in counts]
    report.table(f"weak scaling: {args.device}", rows, COLUMNS)


def _counts(args: argparse.Namespace) -> list[int]:
    try:
        counts = [int(count) for count in args.gpus]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--gpus {','.join(args.gpus)}: wants numbers of GPUs, as in 1,8")
    if args.device == "cuda":
        import torch

        if max(counts) > torch.cuda.device_count():
            raise UserError(f"--gpus {max(counts)}: torch sees {torch.cuda.device_count()}")
    return list(dict.fromkeys(counts))


def _row(
    model: ModelShape, recipe: str, count: int, found: dict[int, list[dict[str, Any]]], args: argparse.Namespace
) -> Row:
    runs = found[count]
    named = {
        "model": model.name,
        "recipe": recipe,
        "batch": f"{args.micro_batch or model.micro_batch}x?",
        "processes": count,
    }
    failures = [run["failed"] for run in runs if "failed" in run]
    if failures:
        return named | {"failed": failures[0]}
    measured = measured_row(runs, count)
    alone = [run["ms"] for run in next(iter(found.values())) if "ms" in run]
    return named | {**measured, "efficiency": median(alone) / measured["ms"] if alone else None}
