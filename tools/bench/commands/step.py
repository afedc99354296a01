"""A training step, built as the driver builds it, under each recipe over bf16; a new process for each."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from megatron_lowprec.errors import UserError
from megatron_lowprec.text_tables import Column, Row, named
from tools.bench.machine import REPOSITORY
from tools.bench.measure import Bench, Timing, combined
from tools.bench.peers.layers import TE_RECIPES, absent
from tools.bench.report import Report, spread_columns
from tools.bench.shapes import ModelShape, models

K = TypeVar("K", bound=Hashable)
Runs = list[dict[str, Any]]
"""Results of ``step_worker``, one a round."""

RECIPES = ("bf16", "mxfp8", "mxfp4_rht_sr")
WITH_PEERS = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "mxfp4_rht_sr")
_SNAPSHOT = " snapshot"  # of a variant with one in every step
NAMED = named("model", "batch", "recipe")
TIMES = spread_columns(2)
RATE = Column("tokens_per_second", "tokens/s", ",.0f")
PEAK, LOSS = Column("peak_gib", "peak GiB", ".1f"), Column("last_loss", "last loss", ".4f")
COLUMNS = (
    *NAMED,
    *TIMES,
    Column("over_bf16", "/bf16", ".3f"),
    Column("over_own", "/own bf16", ".3f"),
    Column("snapshot_ms", "snapshot", ".1f"),
    RATE,
    Column("isolated_ms", "isolated", ".2f"),
    Column("kernel_ms", "kernels", ".1f"),
    Column("idle_ms", "idle", ".1f"),
    Column("update_ms", "update", ".2f"),
    Column("stock_update_ms", "its own", ".2f"),
    PEAK,
    Column("reserved_gib", "reserved", ".1f"),
    Column("first_seconds", "first step s", ".1f"),
    LOSS,
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Each model under each recipe, --rounds times in turn."""
    recipes = list(dict.fromkeys(["bf16", *(args.recipes or (WITH_PEERS if args.peers else RECIPES))]))
    variants = variants_of(args, recipes)
    if args.peers:
        reason = absent("te", bench.device)
        if reason is None:
            te = ["--transformer-impl", "transformer_engine", "--recipe"]
            variants |= {f"TE {recipe}": [*te, recipe] for recipe in TE_RECIPES}
        else:
            report.note(f"peer te is missing: {reason}")
    rows: list[Row] = []
    for model in models_with_config(args.shapes or ("345m", "1.3b")):
        calls: dict[str, tuple[list[str], int | None]] = {name: (flags, None) for name, flags in variants.items()}
        found = measured(model, calls, args, report)
        rows += [_row(model, variant, found, args) for variant in variants]
    notes = [
        f"one process and device, mock data; {args.warm_up} iterations before {args.iterations} timed ones",
        "ms: wall clock from one step's loss to the next one's: data, forward, backward, optimizer, scheduler",
        "isolated: one step with the device idle before and after it; peak: memory allocated or held by graphs",
        "kernels: sum of the kernels' times in a step; idle: GPU time between them under the profiler",
        "update: only the optimizer step, device idle before and after it; its own: Megatron-core's optimizer step",
    ]
    if args.cuda_graphs:
        notes.append("graphs: --cuda-graph-impl local, others none")
    if args.snapshots:
        notes.append("snapshot: ms with a quantization-error snapshot in every step, less ms without")
        notes.append("--cuda-graph-impl none with and without snapshots")
    if args.peers:
        notes.append("/own bf16: of the same layers, ours or TransformerEngine's")
    report.note(*notes, *sorted({run["layers"] for row in rows for run in row.get("runs", [])}))
    optional = {"over_own": bool(args.peers), "snapshot_ms": args.snapshots}
    columns = [column for column in COLUMNS if optional.get(column.key, True)]
    report.table(f"step: {args.device}", rows, columns)


def variants_of(args: argparse.Namespace, recipes: Sequence[str]) -> dict[str, list[str]]:
    """Row -> flags of the driver, of this project's layers; UserError if they cannot be captured in CUDA graphs."""
    variants = {recipe: ["--recipe", recipe] for recipe in recipes}
    variants |= {
        f"{recipe} {optimizer}": [*flags, "--optimizer", optimizer]
        for optimizer in args.optimizers
        for recipe, flags in variants.items()
    }
    if args.cuda_graphs or args.snapshots:  # what has a snapshot in every step cannot be captured
        variants = {recipe: [*flags, "--cuda-graph-impl", "none"] for recipe, flags in variants.items()}
    plain = dict(variants)
    if args.cuda_graphs:
        if args.device == "cpu" or args.warm_up < 2:
            raise UserError(
                f"--cuda-graphs with --device {args.device} and --warm-up {args.warm_up}: layers are captured on a "
                "GPU, in the second iteration; use --device cuda and --warm-up 2 or more"
            )
        variants |= {f"{name} graphs": [*flags[:-1], "local"] for name, flags in plain.items()}
    if args.snapshots:
        every = ["--log-quantization-interval", "1"]
        variants |= {f"{name}{_SNAPSHOT}": [*flags, *every] for name, flags in plain.items() if name != "bf16"}
    return variants


def models_with_config(names: Sequence[str]) -> list[ModelShape]:
    """The models; raises UserError for one that the driver cannot build."""
    found = models(names)
    without = [model.name for model in found if model.config is None]
    if without:
        raise UserError(f"--shapes {','.join(without)}: no config in configs/models; leave it out")
    return found


def measured(
    model: ModelShape, variants: Mapping[K, tuple[list[str], int | None]], args: argparse.Namespace, report: Report
) -> dict[K, Runs]:
    """Runs of each variant, which is flags and a number of processes (None: no torchrun), --rounds times in turn."""
    found: dict[K, Runs] = {variant: [] for variant in variants}
    for turn in range(args.rounds):
        for variant, (flags, processes) in variants.items():
            result = in_fresh_process(model, flags, args, processes)
            found[variant].append(result)
            text = result.get("failed") or f"{result['ms']:.2f} ms, peak {result['peak_gib']:.1f} GiB"
            report.progress(f"{model.name} {variant}, round {turn + 1}: {text}")
    return found


def in_fresh_process(
    model: ModelShape, flags: list[str], args: argparse.Namespace, processes: int | None
) -> dict[str, Any]:
    """Result of ``step_worker``, or the end of its stderr; ``processes``: under torchrun, only the step."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        job = {
            "flags": ["--config", model.config, *flags],
            "micro_batch": args.micro_batch or model.micro_batch,
            "warm_up": args.warm_up,
            "iterations": args.iterations,
            "result": str(result),
            "step_alone": processes is not None,
        }
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [
            sys.executable,
            *(torchrun if processes is not None else []),
            "-m",
            "tools.bench.commands.step_worker",
        ]
        done = subprocess.run([*command, json.dumps(job)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if done.returncode or not result.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            print(done.stderr, file=sys.stderr)
            return {"failed": lines[-1][:160]}
        content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return content


def _row(model: ModelShape, variant: str, found: dict[str, Runs], args: argparse.Namespace) -> Row:
    runs = found[variant]
    row = row_of(model, variant, runs, args)
    if "failed" in row:
        return row
    plain = median_ms(found["bf16"])
    own = median_ms(found["TE bf16"]) if variant.startswith("TE ") else plain
    without = median_ms(found[variant.removesuffix(_SNAPSHOT)]) if variant.endswith(_SNAPSHOT) else None
    first = runs[0]
    return row | {
        "over_bf16": row["ms"] / plain if plain else None,
        "over_own": row["ms"] / own if own else None,
        "snapshot_ms": None if without is None else row["ms"] - without,
        "reserved_gib": max(run["reserved_gib"] for run in runs),
        "idle_ms": None if first["idle"] is None else first["idle"]["ms"],
        **{name: first[name] for name in ("kernel_ms", "first_seconds")},
        **{name: median(run[name] for run in runs) for name in ("isolated_ms", "update_ms", "stock_update_ms")},
    }


def row_of(model: ModelShape, recipe: str, runs: Runs, args: argparse.Namespace, processes: int = 1) -> dict[str, Any]:
    """The row of all rounds; each process has its own batch."""
    row: dict[str, Any] = {"model": model.name, "batch": f"{args.micro_batch or model.micro_batch}x?", "recipe": recipe}
    failures = [run["failed"] for run in runs if "failed" in run]
    if failures:
        return row | {"failed": failures[0]}
    first, timing = runs[0], combined([Timing(run["ms"], run["low"], run["high"]) for run in runs])
    return (
        timing.row()
        | row
        | {
            "batch": f"{first['micro_batch']}x{first['sequence']}",
            "tokens_per_second": processes * first["micro_batch"] * first["sequence"] / timing.ms * 1e3,
            "peak_gib": max(run["peak_gib"] for run in runs),
            "last_loss": first["losses"][-1],
            "runs": runs,
        }
    )


def median_ms(runs: Runs) -> float | None:
    """Of the runs that succeeded; None without one."""
    taken = [run["ms"] for run in runs if "ms" in run]
    return median(taken) if taken else None
