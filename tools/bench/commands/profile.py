"""One profiled step of the driver, by kind of kernel: milliseconds, and the floor of each kind by operations and bytes.

Each recipe is a run of the driver under torchrun with ``--profile``, whose trace of rank 0 is read; or ``--trace``
names a trace that a run wrote. Kernels of several streams count in full, so the parts may exceed the step.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.text_tables import Column, Row, named
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.models.architectures import architecture_of
from megatron_lowprec.training.models.sizes import linear_sites, num_non_embedding_parameters
from tools.bench.commands.step import models_with_config
from tools.bench.kernels import Kernel, by_name, covered
from tools.bench.machine import REPOSITORY
from tools.bench.measure import Bench
from tools.bench.report import Report
from tools.bench.shapes import ModelShape

KINDS: dict[str, str] = {
    "NCCL": "nccl",
    "attention": "flash|fmha|sdpa|attention",
    "update": "adam|muon|multi_tensor_apply",
    "GEMMs": "gemm|wgrad|nvjet|cutlass|xmma|cublas|splitk",
    "SwiGLU, GELU": "swiglu|gelu",
    "norms": "_norm_|layer_?norm|rms_?norm",
    "dropout, biases": "dropout|bias",
    "rope": "rope",
    "loss": "logit|cross_entropy|softmax",
    "FP8-LM's gradients": "_gradient_",
    "casts": "cast|quantize|amax|transpose|codes|_mx_kernel|_pad_groups|_packed|_signs|_stats",
    "copies": "memcpy|memset|copy|catarray|fillfunctor",
    "elementwise": "elementwise|reduce_kernel|functor|indexing|index",
}
"""Kind -> what a kernel's name contains, first match first; "other" for the rest."""
COLUMNS = (
    *named("model", "recipe", "kind"),
    Column("ms", "ms", ".1f"),
    Column("share", "of the step", ".1%"),
    Column("floor_ms", "floor", ".1f"),
    Column("launches", "launches", "d"),
)
_START = 6  # iterations before the profiled one
_LONGEST = 8  # kernels of a kind that are kept by name


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Each model under each recipe, or the trace of --trace."""
    (model,) = models_with_config(args.shapes or ["8b"])
    report.note(
        f"{args.gpus} GPUs, {args.microbatches} microbatches a step; rank 0, one step; data parallel",
        f"floor: operations at {args.tflops} TFLOP/s (bf16, FP8), bytes at {args.bandwidth} TB/s",
        "exposed: NCCL without another kernel; idle: no kernel, the GPU waits for the host or another rank",
    )
    recipes = args.recipes or ["bf16", "fp8_current"]
    if args.trace is not None and len(recipes) != 1:
        raise UserError(f"--trace {args.trace} is of one recipe: name it by --recipes")
    rows: list[Row] = []
    for recipe in recipes:
        found = {} if args.trace is None else {"kernels": kernels_of(args.trace)}
        found = found or in_fresh_process(model, recipe, args)
        report.progress(f"{model.name} {recipe}: {found.get('failed') or 'profiled'}")
        kernels = found.pop("kernels", [])
        parts = table(kernels, floors(model, recipe, args)) if kernels else [{"kind": "step", **found}]
        rows += [{"model": model.name, "recipe": recipe, **part} for part in parts]
    report.table(f"a step by kind of kernel: {args.device}", rows, COLUMNS)


def in_fresh_process(model: ModelShape, recipe: str, args: argparse.Namespace) -> dict[str, Any]:
    """Kernels of a profiled step of the driver, or the reason of its failure."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
        words += ["pretrain_gpt.py", *flags_of(model, recipe, args), "--save", folder]
        done = subprocess.run(words, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, check=False)
        trace = Path(folder, "profile", "rank0.json")
        if done.returncode or not trace.exists():
            print(done.stderr, file=sys.stderr)
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
            return {"failed": lines[-1][:160]}
        return {"kernels": kernels_of(trace)}


def flags_of(model: ModelShape, recipe: str, args: argparse.Namespace) -> list[str]:
    """Arguments of the driver: data parallelism alone, and one profiled iteration."""
    batch = args.micro_batch or model.micro_batch or 1
    return [
        *("--config", str(model.config), "--recipe", recipe, "--mock-data", "--eval-iters", "0", "--no-save"),
        *("--tensor-model-parallel-size", "1", "--micro-batch-size", str(batch)),
        *("--global-batch-size", str(batch * args.microbatches * args.gpus), "--train-iters", str(_START + 2)),
        *("--profile", "--profile-step-start", str(_START), "--profile-step-end", str(_START + 1)),
    ]


def kernels_of(trace: Path) -> list[Kernel]:
    """Kernels and copies of a Chrome trace, in the order of their start.

    Raises:
        UserError: the file is no trace, or has no kernels.
    """
    try:
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        found = [
            Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            for event in events
            if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--trace {trace}: must be a Chrome trace of torch's profiler ({error!r})") from None
    if not found:
        raise UserError(f"--trace {trace}: has no kernel; --profile a run on a GPU")
    return sorted(found, key=lambda kernel: kernel.start)


def kind_of(name: str) -> str:
    """Kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.I)), "other")


def table(kernels: Sequence[Kernel], floor_ms: dict[str, float]) -> list[Row]:
    """Rows of a step: each kind, exposed NCCL, idle time, and the whole."""
    step = max(kernel.end for kernel in kernels) - kernels[0].start
    taken: dict[str, list[tuple[str, float]]] = {kind: [] for kind in (*KINDS, "other")}
    for kernel in kernels:
        taken[kind_of(kernel.name)].append((kernel.name, kernel.end - kernel.start))
    rows: list[Row] = [
        {
            "kind": kind,
            "ms": sum(sum(times) for _, times in own) / 1e3,
            "launches": sum(len(times) for _, times in own),
            "floor_ms": floor_ms.get(kind),
            "kernels": [{"name": n, "ms": sum(times) / 1e3, "launches": len(times)} for n, times in own[:_LONGEST]],
        }
        for kind, found in taken.items()
        if (own := by_name(found))
    ]
    others = [kernel for kernel in kernels if kind_of(kernel.name) != "NCCL"]
    busy, computing = covered(kernels), covered(others)
    rows.append({"kind": "NCCL, exposed", "ms": (busy - computing) / 1e3, "floor_ms": 0.0})
    rows.append({"kind": "idle", "ms": (step - busy) / 1e3, "floor_ms": 0.0})
    rows.append({"kind": "step", "ms": step / 1e3, "launches": len(kernels), "floor_ms": sum(floor_ms.values())})
    return [{**row, "share": row["ms"] * 1e3 / step} for row in rows]


def floors(model: ModelShape, recipe: str, args: argparse.Namespace) -> dict[str, float]:
    """Least milliseconds of a step's kinds: model operations at the GPU's rate, bytes of bf16 at its memory's.

    Casts read x and dy once in bf16 and write codes of both directions, of weights once a step. A norm reads x and
    writes y, and its backward pass moves 8 bytes an entry with the residual's gradient. The update moves 30 bytes.
    """
    config = resolve_model(parse(["--config", str(model.config), "--recipe", recipe])[0])
    tokens = args.microbatches * (args.micro_batch or model.micro_batch or 1) * config.seq_length
    hidden, layers, ffn = config.hidden_size, config.num_layers, config.ffn_hidden_size
    sites = linear_sites(config)
    weights = sum(site.in_features * site.out_features for site in sites)
    width = sum(site.in_features + site.out_features for site in sites)
    bf16, fp8 = (rate * 1e12 for rate in args.tflops)
    native = recipe.startswith("fp8")
    logits = 6.0 * tokens * hidden * (config.vocab_size or 50257)
    scores = 6.0 * tokens * layers * architecture_of(config).attention.score_channels(config) * config.seq_length
    seconds = {
        "GEMMs": 6.0 * tokens * weights / (fp8 if native else bf16) + logits / bf16,
        "attention": scores / bf16,
    }
    moved = {
        "casts": 4.0 * (tokens * width + weights) if native else 0.0,
        "SwiGLU, GELU": 16.0 * tokens * layers * ffn if config.swiglu else 0.0,
        "norms": (4.0 + 8.0) * 2 * tokens * layers * hidden,
        "update": 30.0 * num_non_embedding_parameters(config) / args.gpus,
    }
    found = seconds | {kind: size / (args.bandwidth * 1e12) for kind, size in moved.items() if size}
    return {kind: time * 1e3 for kind, time in found.items()}
