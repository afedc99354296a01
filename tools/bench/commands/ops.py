"""The ops of a training step besides its linear layers: this project's kernels against torch's or Megatron-core's.

All variants of an op get the same tensors; their results are compared before anything is timed.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from megatron_lowprec.text_tables import Column, Row, named
from megatron_lowprec.training.distributed import startup
from tools.bench.cases.op_cases import LAYERS, OPS, Inputs, OpCase
from tools.bench.measure import Bench, Call, Copy, errors, one_line, rate
from tools.bench.report import Report, spread_columns
from tools.bench.shapes import ModelShape, models

COLUMNS = (
    *named("model", "op", "size", "variant"),
    *spread_columns(),
    Column("over", "/first", ".3f"),
    Column("tb_s", "TB/s", ".2f"),
    Column("of_copy", "of copy", ".1%"),
    Column("step_ms", "ms a step", ".2f"),
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Every chosen op of every chosen model."""
    startup.prepare_environment()  # before Megatron-core is imported
    if not bench.on_gpu:
        torch._dynamo.config.disable = True
    large = bench.copy(args.copy_bytes)
    generator = torch.Generator(bench.device).manual_seed(args.seed)
    rows: list[Row] = []
    notes: set[str] = set()
    for model in models(args.shapes or ("345m", "1.3b")):
        torch.compiler.reset()  # as in a run, which has one size
        tokens, vocabulary = ((model.micro_batch or 1) * 2048, 50304) if bench.on_gpu else (32, 500)
        given = Inputs(model, bench.device, generator, tokens, vocabulary)
        for name in args.ops or OPS:
            for op in OPS[name](given):
                rows += _rows(model, op, args.rounds, bench, large, notes)
            report.progress(f"{model.name} {name} done")
    report.note(
        f"copy: {large.terabytes_per_second:.2f} TB/s, {large.moved_bytes >> 20} MiB moved; bf16; inputs drawn with "
        f"--seed {args.seed}",
        f"kernels alone, replayed as CUDA graphs; {args.rounds} rounds in turn; TB/s: of the bytes that must move",
        f"ms a step: of a model of {LAYERS} layers",
        *sorted(notes),
    )
    report.table(f"ops besides the linear layers: {args.device}", rows, COLUMNS, copy=large.row())


def _rows(
    model: ModelShape, op: OpCase, rounds: int, bench: Bench, large: Copy, notes: set[str]
) -> Iterator[dict[str, Any]]:
    start = {"model": model.name, "op": op.name, "size": op.size}
    reason = op.fault()
    if reason is not None:
        yield start | {"variant": "ours", "failed": reason}
        return
    calls: dict[str, Call] = {}
    for variant, call in op.variants.items():
        try:
            call()
        except errors() as error:
            yield start | {"variant": variant, "failed": one_line(error)}
            continue
        captured = bench.captured(call)
        if isinstance(captured, str):
            notes.add(f"not a graph, launches included: {op.name} by {variant}: {captured}")
        calls[variant] = call if isinstance(captured, str) else captured
    timings = bench.compare(calls, rounds)
    first = timings.get(next(iter(op.variants)))  # a variant that failed is compared with nothing
    for variant, timing in timings.items():
        row = start | timing.row() | {"variant": variant, "step_ms": op.times * timing.ms, "moved_bytes": op.moved}
        row["over"] = None if first is None else timing.ms / first.ms
        if op.moved is not None:
            row["tb_s"] = rate(op.moved, timing.ms)
            row["of_copy"] = row["tb_s"] / large.terabytes_per_second
        yield row
