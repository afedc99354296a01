"""Gradients over data-parallel ranks: FP8-LM's exchange beside reduce-scatters in fp32 and bf16."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lowprec.recipe.yaml_text import read_yaml_file
from megatron_lowprec.shipped import find
from megatron_lowprec.text_tables import Column, Row, named
from tools.bench.commands.step import models_with_config
from tools.bench.machine import REPOSITORY
from tools.bench.measure import Bench
from tools.bench.report import Report, spread_columns
from tools.bench.shapes import ModelShape

CALLS = 20
COLUMNS = (
    *named("model", "exchange", "part"),
    Column("processes", "GPUs", "d"),
    *spread_columns(3)[:3],
    Column("over_bf16", "/bf16", ".2f"),
    Column("mib", "MiB sent", ",.0f"),
    Column("gb_s", "GB/s", ".0f"),
    Column("distance", "distance", ".4f"),
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """The gradients of each model's decoder layers on --gpus ranks."""
    report.note(
        "gradients of the decoder layers' matrices in buckets of at least 40M entries, one bucket after another",
        f"ms: rank 0's device time, median of {CALLS} calls; sent: bytes that a rank sends to others",
        "/bf16: over a bf16 reduce-scatter; distance: of the sum from fp32's, relative",
    )
    rows: list[Row] = []
    for model in models_with_config(args.shapes or (["345m"] if bench.on_gpu else ["smoke"])):
        rows += _rows(model, args.gpus, _measured(tensors_of(model), args.gpus))
    report.table(f"exchange of gradients: {args.device}", rows, COLUMNS)


def tensors_of(model: ModelShape) -> list[int]:
    """Entries of each matrix of the decoder layers."""
    layers = read_yaml_file(find(str(model.config)), str(model.config), "")["num-layers"]
    return [linear.in_features * linear.out_features for _ in range(layers) for linear in model.linears]


def _measured(tensors: Sequence[int], gpus: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        job = {"tensors": list(tensors), "calls": CALLS, "result": str(result)}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        command = [*torchrun, "-m", "tools.bench.commands.exchange_worker", json.dumps(job)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if done.returncode or not result.exists():
            print(done.stderr, file=sys.stderr)
            return {"failed": f"exit code {done.returncode}"}
        content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return content


def _rows(model: ModelShape, gpus: int, found: dict[str, Any]) -> list[Row]:
    if "failed" in found:
        return [{"model": model.name, "exchange": "all", "part": "", "failed": found["failed"]}]
    bf16 = next(row for row in found["rows"] if row["exchange"] == "bf16 reduce-scatter")["ms"]
    return [
        row
        | {
            "model": model.name,
            "processes": gpus,
            "over_bf16": row["ms"] / bf16,
            "mib": row["sent"] / 2**20 if row["sent"] else None,
            "gb_s": row["sent"] / row["ms"] / 1e6 if row["sent"] else None,
        }
        for row in found["rows"]
    ]
