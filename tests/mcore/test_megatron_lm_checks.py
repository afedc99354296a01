"""Megatron-LM's arguments under --spec: what a recipe needs or cannot have is named."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec import UserError, get_recipe, load_recipe
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


OF_STOCK_LAYERS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 0},
        "--first-last-layers-bf16",
        "write keep_bf16.first_layers=2 keep_bf16.last_layers=0 after the recipe's name",
    ),
    (
        {"first_last_layers_bf16": True},
        "--first-last-layers-bf16",
        "write keep_bf16.first_layers=1 keep_bf16.last_layers=1 after the recipe's name",
    ),
    ({"num_layers_at_start_in_bf16": 3}, "--num-layers-at-start-in-bf16 3", "write keep_bf16.first_layers=3 after"),
    ({"num_layers_at_end_in_bf16": 0}, "--num-layers-at-end-in-bf16 0", "write keep_bf16.last_layers=0 after"),
    ({"fp8_recipe": "blockwise"}, "--fp8-recipe blockwise", "name a recipe"),
    ({"fp8_margin": 3}, "--fp8-margin 3", "write fprop.input.margin=3 after"),
    ({"fp8_interval": 2}, "--fp8-interval 2", "scales are computed at every step"),
    ({"fp8_amax_history_len": 7}, "--fp8-amax-history-len 7", "write fprop.input.history=7 after"),
    ({"fp8_amax_compute_algo": "max"}, "--fp8-amax-compute-algo max", "write fprop.input.history_rule=max after"),
    ({"fp8_wgrad": False}, "--no-fp8-wgrad", "write wgrad.input=null wgrad.grad_output=null after"),
    ({"fp8_quantizer_factory": "a.b"}, "--fp8-quantizer-factory a.b", "name a YAML file"),
    ({"fp4_recipe": "custom"}, "--fp4-recipe custom", "name a recipe with FP4"),
    ({"fp4_quantizer_factory": "a.b"}, "--fp4-quantizer-factory a.b", "name a YAML file"),
]
OTHER_OPERANDS = ("fprop.weight", "dgrad.weight", "dgrad.grad_output", "wgrad.input", "wgrad.grad_output")
DEFAULTS = {
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
    "fp8_recipe": "delayed",
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_wgrad": True,
    "fp8_quantizer_factory": None,
    "fp4_recipe": "nvfp4",
    "fp4_quantizer_factory": None,
    "spec": ["megatron_lowprec.specs", "mxfp8"],
}


@pytest.mark.parametrize(("changes", "given", "instead"), OF_STOCK_LAYERS)
def test_quantization_of_stock_layers_is_refused(changes: dict[str, Any], given: str, instead: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(given)} has no effect under --spec: .*{re.escape(instead)}"):
        check_arguments(get_recipe("fp8_delayed"), SimpleNamespace(**{**ENOUGH, **DEFAULTS, **changes}))
    overrides = re.findall(r"\S+=\S+", instead)
    for operand in OTHER_OPERANDS if "fprop.input" in instead else ():  # "and the same for the other operands"
        overrides.append(overrides[0].replace("fprop.input", operand))
    load_recipe("fp8_delayed", overrides)  # raises for advice that no recipe takes


def test_fields_of_a_history_are_not_advised_without_one() -> None:
    with pytest.raises(UserError, match=r"--fp8-margin 3 has no effect .* recipe mxfp8 keeps no amax history"):
        check_arguments(get_recipe("mxfp8"), SimpleNamespace(**{**ENOUGH, **DEFAULTS, "fp8_margin": 3}))


def test_defaults_of_quantization_are_accepted() -> None:
    check_arguments(get_recipe("mxfp8"), SimpleNamespace(**ENOUGH, **DEFAULTS))


def test_a_gather_of_codes_needs_sequence_parallelism() -> None:
    """As in the driver. Megatron-LM has the flag off at a tensor-parallel size of 1, where it was given as well."""
    spec = ["megatron_lowprec.specs", "fp8_delayed --fp8-sequence-parallel-gather"]
    for given in ({"sequence_parallel": True, "spec": spec}, {"spec": None}, {"spec": spec[:1]}):
        check_arguments(get_recipe("fp8_delayed"), SimpleNamespace(**{**ENOUGH, **given}))
    with pytest.raises(UserError, match="--fp8-sequence-parallel-gather in --spec does nothing without --sequence-par"):
        check_arguments(get_recipe("fp8_delayed"), SimpleNamespace(**ENOUGH, sequence_parallel=False, spec=spec))


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
