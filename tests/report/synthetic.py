"""Runs without training: folders as the driver writes them, with curves whose truth is known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_lowprec.recipe.parsing import load_recipe, recipe_to_dict
from megatron_lowprec.recipe.schema import GEMM_OPERANDS

OPTIONS: dict[str, Any] = {
    "config": "configs/models/gpt_25m.yaml",
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 1024,
    "global_batch_size": 64,
    "train_iters": 400,
    "lr": 1e-3,
    "train_data_path": ["wiki_text_document"],
}

MXFP8_OPERANDS = tuple((gemm, operand) for gemm, operands in GEMM_OPERANDS.items() for operand in operands)


@cache
def _recipe_yaml(recipe: str, overrides: tuple[str, ...]) -> str:
    return yaml.safe_dump({"recipe": recipe_to_dict(load_recipe(recipe, overrides))})


def write_run(
    folder: Path,
    recipe: str = "bf16",
    seed: int = 1,
    final: float = 3.7,
    *,
    early: float = 0.0,
    noise: float = 0.02,
    ends_at: int | None = None,
    nan_from: int | None = None,
    blows_up_from: int | None = None,
    norms: Sequence[float] | None = None,
    options: Mapping[str, Any] | None = None,
    overrides: tuple[str, ...] = (),
    parameters: int | None = 51_000_000,
) -> Path:
    """A run whose validation loss ends at exactly ``final`` nats.

    Args:
        early: nats that fade out over the first quarter.
        noise: of single iterations' training loss; the same for a seed under every recipe, as the data are.
        ends_at: the iteration after which it was killed.
        nan_from: the iteration from which its losses are NaN.
        blows_up_from: the iteration from which its losses climb.
        norms: gradient norm in each fifth of the run; not recorded without it.
    """
    chosen = {**OPTIONS, **(options or {}), "seed": seed, "recipe": recipe}
    iters, batch, every = chosen["train_iters"], chosen["global_batch_size"], max(1, chosen["train_iters"] // 8)
    rng = np.random.default_rng(seed)
    jitter = noise * rng.standard_normal(iters)
    at = np.arange(1, iters + 1) / iters
    shape = 7.2 * np.exp(-at / 0.04) + 0.55 * (1 - at) ** 1.5 + early * np.exp(-at / 0.12)
    losses = final + shape - shape[-1]
    if blows_up_from is not None:
        losses = losses + np.clip((at * iters - blows_up_from) / iters * 20, 0, 3)
    rows: list[dict[str, float]] = []
    for i in range(1, (ends_at or iters) + 1):
        lost = nan_from is not None and i >= nan_from
        row = {"iteration": i, "consumed samples": i * batch}
        loss = math.nan if lost else float(losses[i - 1] + jitter[i - 1])
        if norms is not None:
            row["grad-norm"] = norms[5 * (i - 1) // iters]
        rows.append({**row, "lm loss": loss, "iteration-time": 0.1 if i > 3 else 5.0, "skipped iterations": 0})
        if i % every == 0 or i == iters:
            rows.append({**row, "lm loss validation": math.nan if lost else float(losses[i - 1])})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(yaml.safe_dump({"options": chosen}) + _recipe_yaml(recipe, overrides))
    record = {
        "gemms": dict.fromkeys(
            ("fprop", "dgrad", "wgrad"), "not quantized" if recipe == "bf16" else "emulated: no unit"
        ),
        "device": "NVIDIA H200",
        "processes": 2,
        "versions": {"torch": "2.11.0", "megatron-core": "0.16.1"},
        "commit": "0123456789ab",
        "parameters": parameters,
        "peak_memory_bytes": 7 * 2**30,
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def write_sweep(
    folder: Path,
    finals: Mapping[str, float | list[float]],
    seeds: int = 3,
    scatter: float = 0.002,
    *,
    name: str = "synthetic",
    shared: float = 0.01,
    **more: Any,
) -> Path:
    """A sweep of recipes; a recipe's final losses are its own plus its seed's effect plus scatter, or as listed.

    Args:
        scatter: standard deviation of what recipe and seed do not explain.
        shared: standard deviation of the seeds' effects, the same under every recipe.
    """
    rng = np.random.default_rng(7)
    effects = shared * rng.standard_normal(seeds)
    cells = []
    for label, final in finals.items():
        recipe, *overrides = label.split("+")
        drawn = effects + scatter * rng.standard_normal(seeds)
        losses = final if isinstance(final, list) else [final + each for each in drawn.tolist()]
        for seed, loss in enumerate(losses, 1):
            write_run(folder / f"{label}-s{seed}", recipe, seed, loss, overrides=tuple(overrides), **more)
            cells.append(cell(label, seed))
    add_cells(folder, name, cells)
    return folder


def operand_row(
    iteration: int, linear: str, snr: float | None, gemm: str = "dgrad", operand: str = "grad_output", **more: Any
) -> dict[str, Any]:
    """A line of quantization.jsonl."""
    named = {"linear": linear, "gemm": gemm, "operand": operand, "format": "e2m1"}
    found = {"entries": 64, "amax": 4.0, "snr": snr, "bias": 1e-3, "underflow": 0.25, "saturation": 0.0}
    return {"iteration": iteration, **named, **found, **more}


def write_snapshots(folder: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """quantization.jsonl in a run's folder, which need not be there."""
    folder.mkdir(exist_ok=True)
    (folder / "quantization.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def cell(label: str, seed: int, **more: Any) -> dict[str, Any]:
    """A cell as sweep.json has it."""
    name = f"{label}-s{seed}"
    return {"id": name, "label": label, "recipe": label, "model": "gpt_25m", "seed": seed, "run": name, **more}


def add_cells(folder: Path, name: str, cells: list[dict[str, Any]]) -> None:
    """Write sweep.json, or add to it."""
    path = folder / "sweep.json"
    before = json.loads(path.read_text())["cells"] if path.exists() else []
    path.write_text(json.dumps({"name": name, "size": "small", "cells": before + cells}))
