"""A whole training step, built as the driver builds it, under each recipe over bf16; a fresh process for each."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from megatron_lowprec.errors import UserError
from tools.bench.machine import REPOSITORY
from tools.bench.measure import Bench
from tools.bench.peers.layers import TE_RECIPES, absent
from tools.bench.report import Report
from tools.bench.shapes import ModelShape, models
from tools.bench.table import Column, Row

RECIPES = ("bf16", "mxfp8", "mxfp4_rht_sr")
BESIDE_PEERS = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "mxfp4_rht_sr")
COLUMNS = (
    Column("model", "model"),
    Column("batch", "batch"),
    Column("recipe", "recipe"),
    Column("ms", "ms/step", ".2f"),
    Column("low", "p20", ".2f"),
    Column("high", "p80", ".2f"),
    Column("noise", "rounds", ".1%"),
    Column("over_bf16", "/bf16", ".3f"),
    Column("over_own", "/own bf16", ".3f"),
    Column("tokens_per_second", "tokens/s", ",.0f"),
    Column("isolated_ms", "isolated", ".2f"),
    Column("kernel_ms", "kernels", ".1f"),
    Column("idle_ms", "idle", ".1f"),
    Column("update_ms", "update", ".2f"),
    Column("stock_update_ms", "its own", ".2f"),
    Column("peak_gib", "peak GiB", ".1f"),
    Column("reserved_gib", "reserved", ".1f"),
    Column("first_seconds", "first step s", ".1f"),
    Column("last_loss", "last loss", ".4f"),
)

_ABOUT_GRAPHS = (
    "graphs: layers replayed as CUDA graphs, captured in the second iteration; what they keep is in reserved, not in "
    "the peak of the timed iterations"
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Each model under each recipe, --rounds times in turn."""
    recipes = list(dict.fromkeys(["bf16", *(args.recipes or (BESIDE_PEERS if args.peers else RECIPES))]))
    variants = {recipe: ["--recipe", recipe] for recipe in recipes}
    if args.cuda_graphs:
        if args.device == "cpu" or args.warm_up < 2:
            raise UserError(
                f"--cuda-graphs with --device {args.device} and --warm-up {args.warm_up}: layers are captured on a "
                "GPU, in the second iteration; use --device cuda and --warm-up 2 or more"
            )
        variants |= {f"{recipe} graphs": ["--recipe", recipe, "--cuda-graph-impl", "local"] for recipe in recipes}
    if args.peers:
        reason = absent("te", bench.device)
        if reason is None:
            te = ["--transformer-impl", "transformer_engine", "--recipe"]
            variants |= {f"TE {recipe}": [*te, recipe] for recipe in TE_RECIPES}
        else:
            report.note(f"peer te is missing: {reason}")
    rows: list[Row] = []
    chosen = models(args.shapes or ("345m", "1.3b"))
    without = [model.name for model in chosen if model.config is None]
    if without:
        raise UserError(f"--shapes {','.join(without)}: there is no config of it in configs/models; leave it out")
    for model in chosen:
        found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
        for turn in range(args.rounds):
            for variant, flags in variants.items():
                result = in_fresh_process(model, flags, args)
                found[variant].append(result)
                said = result.get("failed") or f"{result['ms']:.2f} ms, peak {result['peak_gib']:.1f} GiB"
                report.progress(f"{model.name} {variant}, round {turn + 1}: {said}")
        rows += [_row(model, variant, found, args) for variant in variants]
    report.note(
        f"one process and device, mock data; {args.warm_up} iterations before {args.iterations} timed ones",
        "ms/step: wall clock from one step's loss to the next one's: data, forward, backward, optimizer, scheduler",
        "isolated: one step with the device idle before and after it; peak: allocated memory",
        "kernels: sum of the kernels' times in a step; idle: GPU time between them under the profiler",
        "update: the optimizer step alone, device idle before and after it; its own: Megatron-core's optimizer step",
        *([_ABOUT_GRAPHS] if args.cuda_graphs else []),
        *(["/own bf16: of the same layers, ours or TransformerEngine's"] if args.peers else []),
        *sorted({run["layers"] for row in rows for run in row.get("runs", [])}),
    )
    columns = [column for column in COLUMNS if args.peers or column.key != "over_own"]
    report.table(f"step: {args.device}", rows, columns)


def in_fresh_process(
    model: ModelShape, flags: list[str], args: argparse.Namespace, processes: int | None = None
) -> dict[str, Any]:
    """What ``step_worker`` writes, or the end of what it says on stderr; ``processes``: by torchrun, the step alone."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        asked = {
            "flags": ["--config", model.config, *flags],
            "micro_batch": args.micro_batch or model.micro_batch,
            "warm_up": args.warm_up,
            "iterations": args.iterations,
            "result": str(result),
            "step_alone": processes is not None,
        }
        command = [sys.executable, "-m", "tools.bench.step_worker", json.dumps(asked)]
        if processes is not None:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command[1:1] = torchrun
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if done.returncode or not result.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            print(done.stderr, file=sys.stderr)
            return {"failed": lines[-1][:160]}
        content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return content


def _row(model: ModelShape, recipe: str, found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> Row:
    named = {
        "model": model.name,
        "batch": f"{args.micro_batch or model.micro_batch}x?",
        "recipe": recipe,
    }
    runs = found[recipe]
    failures = [run["failed"] for run in runs if "failed" in run]
    if failures:
        return named | {"failed": failures[0]}
    measured, first = measured_row(runs), runs[0]
    ms = measured["ms"]
    plain, own = _bf16_ms(found, "bf16"), _bf16_ms(found, "TE bf16" if recipe.startswith("TE ") else "bf16")
    return named | {
        **measured,
        "over_bf16": ms / plain if plain else None,
        "over_own": ms / own if own else None,
        "reserved_gib": max(run["reserved_gib"] for run in runs),
        "isolated_ms": median(run["isolated_ms"] for run in runs),
        "kernel_ms": first["kernel_ms"],
        "idle_ms": None if first["idle"] is None else first["idle"]["ms"],
        "update_ms": median(run["update_ms"] for run in runs),
        "stock_update_ms": median(run["stock_update_ms"] for run in runs),
        "first_seconds": first["first_seconds"],
    }


def measured_row(runs: list[dict[str, Any]], processes: int = 1) -> Row:
    """What a row of whole steps says, of all rounds; each process has a batch of its own."""
    ms, first = median(run["ms"] for run in runs), runs[0]
    return {
        "batch": f"{first['micro_batch']}x{first['sequence']}",
        "ms": ms,
        "low": min(run["low"] for run in runs),
        "high": max(run["high"] for run in runs),
        "noise": (max(run["ms"] for run in runs) - min(run["ms"] for run in runs)) / ms,
        "tokens_per_second": processes * first["micro_batch"] * first["sequence"] / ms * 1e3,
        "peak_gib": max(run["peak_gib"] for run in runs),
        "last_loss": first["losses"][-1],
        "runs": runs,
    }


def _bf16_ms(found: dict[str, list[dict[str, Any]]], variant: str) -> float | None:
    taken = [run["ms"] for run in found[variant] if "ms" in run]
    return median(taken) if taken else None
