"""Runs with FP8 primary weights: their options on one process and on two, and what is read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.training.helpers import rows

RECIPES: dict[str, dict[str, Any]] = {
    "fp8_current": {"recipe": "fp8_current"},
    "fp8_delayed": {"recipe": "fp8_delayed"},
    # whole blocks on each of two tensor-parallel ranks
    "fp8_blockwise": {"recipe": "fp8_blockwise", "hidden_size": 256, "ffn_hidden_size": 256},
}
EACH_TIME = ("fp8_current",)  # the experts' runs have the blocks of fp8_blockwise
WORKER = "tests/training/primary_worker.py"
COMMON: dict[str, Any] = {"bf16": True, "use_distributed_optimizer": True, "train_iters": 4, "lr_decay_iters": 10}
FLAG: dict[str, Any] = {"fp8_param_gather": True}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": TP2,
    "sequence parallel": {**TP2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "interleaved": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4},
    "overlapped": OVERLAP,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "disable_bias_linear": True, "swiglu": True}
EXPERT_RECIPES = ("fp8_delayed", "fp8_blockwise")


# Weights that a checkpoint stores in two parts, gradients in bf16, and a forward pass that is run twice.
GATED: dict[str, Any] = {
    "swiglu": True,
    "disable_bias_linear": True,
    "grad_reduce_in_bf16": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def halves(name: str, options: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A run whose first half is under ``before``, and the second from its checkpoint under ``after``."""
    return {
        f"{name} half": COMMON | options | before | {"save": f"{name} half", "exit_interval": 2},
        f"{name} rest": COMMON | options | after | {"load": f"{name} half", "no_save": True},
    }


def cases(weekly: bool) -> dict[str, dict[str, Any]]:
    """Name -> options on two processes."""
    found: dict[str, dict[str, Any]] = {}
    for recipe in RECIPES if weekly else EACH_TIME:
        options = RECIPES[recipe]
        for layout, sizes in LAYOUTS.items():
            found[f"{recipe} {layout}"] = COMMON | FLAG | sizes | options | {"no_save": True}
        for layout in ("data", "tensor", "overlapped"):
            found |= halves(f"{recipe} {layout}", LAYOUTS[layout] | options, FLAG, FLAG)
        found |= halves(f"{recipe} data to tensor", options, FLAG, FLAG | TP2)
    gated = GATED | TP2 | {"recipe": "fp8_current"}
    found["gated tensor"] = COMMON | FLAG | gated | {"no_save": True}
    found |= halves("gated tensor", gated, FLAG, FLAG)
    found["own scales"] = COMMON | FLAG | TP2 | {"recipe": "fp8_current", "no_amax_reduce": True, "no_save": True}
    for recipe in EXPERT_RECIPES:
        expert = COMMON | FLAG | EXPERTS | RECIPES[recipe] | {"expert_model_parallel_size": 2}
        found[f"{recipe} experts"] = expert | {"save": f"{recipe} experts"}
    return found


def by_layer(digests: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("module.module."): digest for name, digest in digests.items()}


def lm_losses(folder: Path) -> list[float]:
    return [row["lm loss"] for row in rows(folder) if "lm loss" in row]
