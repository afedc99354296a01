"""Weak scaling of a training step: data parallel on 1 to N GPUs of this machine, with a constant batch per GPU.

All counts run the same flags: distributed optimizer, gradients reduced during the backward pass, weights gathered
during the forward pass. Without communication cost, a step would take as long on N GPUs as on one; efficiency is t1/tN.
"""

import argparse

from megatron_lowprec.errors import UserError
from megatron_lowprec.text_tables import Column, Row
from tools.bench.commands.step import (
    LOSS,
    NAMED,
    PEAK,
    RATE,
    TIMES,
    Runs,
    measured,
    median_ms,
    models_with_config,
    row_of,
)
from tools.bench.measure import Bench
from tools.bench.report import Report
from tools.bench.shapes import ModelShape

RECIPES = ("bf16", "fp8_delayed")
FLAGS = (
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--tensor-model-parallel-size", "1"),
)
COLUMNS = (
    *NAMED,
    Column("processes", "GPUs", "d"),
    *TIMES,
    Column("efficiency", "t1/tN", ".3f"),
    Column("communication_ms", "NCCL", ".1f"),
    Column("exposed_ms", "exposed", ".1f"),
    *(RATE, PEAK, LOSS),
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Each model under each recipe on each number of GPUs, --rounds times in turn."""
    chosen = models_with_config(args.shapes or (["345m", "1.3b"] if bench.on_gpu else ["smoke"]))
    counts = _counts(args)
    report.note(
        f"data parallel, {' '.join(FLAGS)}; mock data; the batch is per GPU",
        f"{args.warm_up} iterations before {args.iterations} timed ones; ms: median of rank 0's wall clock",
        "NCCL: ms of rank 0's step, profiled, with a kernel of NCCL; exposed: those of them without another kernel",
        "peak: allocated memory of rank 0; t1/tN: step time of the first count of GPUs over this one's",
    )
    rows: list[Row] = []
    for model in chosen:
        for recipe in args.recipes or RECIPES:
            variants = {count: ([*FLAGS, "--recipe", recipe], count) for count in counts}
            report.progress(f"{model.name} {recipe}, by number of GPUs:")
            found = measured(model, variants, args, report)
            rows += [_row(model, recipe, count, found, args) for count in counts]
    report.table(f"weak scaling: {args.device}", rows, COLUMNS)


def _counts(args: argparse.Namespace) -> list[int]:
    counts = [int(count) for count in args.gpus if count.isdecimal()]
    if not counts or len(counts) < len(args.gpus) or min(counts) < 1:
        raise UserError(f"--gpus {','.join(args.gpus)}: must be numbers of GPUs, as in 1,8")
    if args.device == "cuda":
        import torch

        if max(counts) > torch.cuda.device_count():
            raise UserError(f"--gpus {max(counts)}: torch sees {torch.cuda.device_count()}")
    return list(dict.fromkeys(counts))


def _row(model: ModelShape, recipe: str, count: int, found: dict[int, Runs], args: argparse.Namespace) -> Row:
    row = row_of(model, recipe, found[count], args, count) | {"processes": count}
    if "failed" not in row:
        alone = median_ms(next(iter(found.values())))
        row["efficiency"] = alone / row["ms"] if alone else None
        of_nccl = found[count][0].get("communication") or {}
        row |= {"communication_ms": of_nccl.get("ms"), "exposed_ms": of_nccl.get("exposed_ms")}
    return row
