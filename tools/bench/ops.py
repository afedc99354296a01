"""What a training step does around its linear layers, by this project's kernels and by torch's or Megatron-core's.

Every pair gets the same tensors; their results are compared before anything is timed.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from megatron_lowprec.training.distributed import startup
from tools.bench.measure import Bench, Call, Copy, errors, one_line, rate
from tools.bench.op_cases import LAYERS, PIECES, Inputs, Piece
from tools.bench.report import Report
from tools.bench.shapes import ModelShape, models
from tools.bench.table import Column, Row

COLUMNS = (
    Column("model", "model"),
    Column("piece", "piece"),
    Column("size", "size"),
    Column("way", "by"),
    Column("ms", "ms", ".4f"),
    Column("low", "p20", ".4f"),
    Column("high", "p80", ".4f"),
    Column("noise", "rounds", ".1%"),
    Column("over", "/first", ".3f"),
    Column("tb_s", "TB/s", ".2f"),
    Column("of_copy", "of copy", ".1%"),
    Column("step_ms", "ms a step", ".2f"),
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Each piece of each model's step."""
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
        for name in args.pieces or PIECES:
            for piece in PIECES[name](given):
                rows += _rows(model, piece, args.rounds, bench, large, notes)
            report.progress(f"{model.name} {name} done")
    report.note(
        f"copy: {large.terabytes_per_second:.2f} TB/s, {large.moved_bytes >> 20} MiB moved; bf16; inputs drawn with "
        f"--seed {args.seed}",
        f"kernels alone, replayed as CUDA graphs; {args.rounds} rounds in turn; TB/s: of the bytes that must move",
        f"ms a step: of a model of {LAYERS} layers",
        *sorted(notes),
    )
    report.table(f"around the linears: {args.device}", rows, COLUMNS, copy=large.row())


def _rows(
    model: ModelShape, piece: Piece, rounds: int, bench: Bench, large: Copy, notes: set[str]
) -> Iterator[dict[str, Any]]:
    named = {"model": model.name, "piece": piece.name, "size": piece.size}
    reason = piece.fault()
    if reason is not None:
        yield named | {"way": "ours", "failed": reason}
        return
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for way, call in piece.ways.items():
        try:
            call()
            captured = bench.captured(call)
        except errors() as error:
            failed[way] = one_line(error)
            continue
        if isinstance(captured, str):
            notes.add(f"not a graph, launches included: {piece.name} by {way}: {captured}")
        calls[way] = call if isinstance(captured, str) else captured
    timings = bench.compare(calls, rounds)
    first = timings.get(next(iter(piece.ways)))  # a way that failed is compared with nothing
    for way in piece.ways:
        if way in failed:
            yield named | {"way": way, "failed": failed[way]}
            continue
        timing = timings[way]
        reached = None if piece.moved is None else rate(piece.moved, timing.ms)
        yield (
            named
            | timing.row()
            | {
                "way": way,
                "noise": timing.noise,
                "over": None if first is None else timing.ms / first.ms,
                "tb_s": reached,
                "of_copy": None if reached is None else reached / large.terabytes_per_second,
                "step_ms": piece.times * timing.ms,
                "moved_bytes": piece.moved,
            }
        )
