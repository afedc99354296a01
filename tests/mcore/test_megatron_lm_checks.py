"""Megatron-LM's arguments under --spec: what a recipe needs or cannot have is named."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec import UserError, get_recipe
from megatron_lowprec.mcore import megatron_lm_checks
from megatron_lowprec.mcore.megatron_lm_checks import check_arguments

ENOUGH: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "bf16": True,
    "dist_ckpt_optim_fully_reshardable": True,
    "ckpt_format": "torch_dist",
    "save": "runs",
    "optimizer": "adam",
    "num_distributed_optimizer_instances": 1,
    "rampup_batch_size": None,
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fp8_lm", {"use_distributed_optimizer": False}, "which needs --use-distributed-optimizer: add it"),
    ("fp8_lm_o3", {"bf16": False}, "which needs --bf16: add it"),
    (
        "fp8_lm",
        {"dist_ckpt_optim_fully_reshardable": False},
        "which needs --dist-ckpt-optim-fully-reshardable: add it",
    ),
    ("fp8_lm", {"optimizer": "sgd"}, "does not work with --optimizer sgd: leave it out"),
    ("fp8_lm", {"use_precision_aware_optimizer": True}, "with --use-precision-aware-optimizer: leave"),
    ("fp8_lm_o1", {"use_torch_fsdp2": True}, "with --use-torch-fsdp2: leave"),
    ("fp8_lm", {"num_distributed_optimizer_instances": 2}, "with --num-distributed-optimizer-instances 2: leave"),
    ("fp8_lm_o3", {"ckpt_format": "torch"}, "with --ckpt-format torch: leave"),
]


@pytest.mark.parametrize(("recipe", "changes", "says"), REFUSED)
def test_flags_that_a_recipes_state_needs_are_named(recipe: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"^recipe {recipe} quantizes optimizer state, .* {re.escape(says)}"):
        check_arguments(get_recipe(recipe), SimpleNamespace(**{**ENOUGH, **changes}))
    check_arguments(get_recipe("fp8_delayed"), SimpleNamespace(**{**ENOUGH, **changes}))


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("fp8_lm_o3", {}),
        ("fp8_lm", {"ckpt_format": "torch", "dist_ckpt_optim_fully_reshardable": False}),
        ("fp8_lm", {"save": None, "dist_ckpt_optim_fully_reshardable": False}),
        ("fp8_lm_o1", {"dist_ckpt_optim_fully_reshardable": False}),
    ],
)
def test_sufficient_flags_are_accepted(recipe: str, changes: dict[str, Any]) -> None:
    check_arguments(get_recipe(recipe), SimpleNamespace(**{**ENOUGH, **changes}))


OF_A_RELEASE = [
    (
        "IGNORES_RAMPS",
        {"rampup_batch_size": [2, 2, 8]},
        "--rampup-batch-size is ignored by .*--step-batch-size-schedule",
    ),
    ("LEAVES_MODEL_ON_CPU", {"use_cpu_initialization": True}, "--use-cpu-initialization leaves .* leave it out"),
]


@pytest.mark.parametrize(("fault", "changes", "says"), OF_A_RELEASE)
@pytest.mark.parametrize("holds", [True, False])
def test_flags_that_a_release_cannot_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, fault: str, changes: dict[str, Any], says: str, holds: bool
) -> None:
    monkeypatch.setattr(megatron_lm_checks, fault, holds)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=says) if holds else contextlib.nullcontext():
        check_arguments(get_recipe("mxfp8"), SimpleNamespace(**{**ENOUGH, **changes}))
