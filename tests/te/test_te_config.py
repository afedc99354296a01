"""Recipes as the fields of Megatron-core's TransformerConfig, for the driver and for Megatron-LM's own flags."""

from __future__ import annotations

import pytest

from megatron_lowprec import recipes
from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.te.te_config import TEConfig, find_te_config, te_config
from tests.refusal import refused
from tests.te.operands import all_operands, operands_of

BACKWARD = {"dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
SHARED = {
    "bf16": {},
    "fp8_delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_margin": 0,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    },
    "fp8_current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8_current_bf16_ends": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    "fp8_blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "mxfp8_e5m2_grad": {"fp8": "hybrid", "fp8_recipe": "mxfp8"},
}


@pytest.mark.parametrize("name", recipes())
def test_shared_recipes_are_megatron_s_fields_and_others_are_refused(name: str) -> None:
    recipe = load_recipe(name, [])
    if name in SHARED:
        assert te_config(recipe).transformer_config() == SHARED[name]
        return
    with refused(", ".join(sorted(SHARED, key=recipes().index)), name):
        te_config(recipe)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "fp8_delayed",
            [*all_operands("history=16"), *all_operands("history_rule=most_recent"), *all_operands("margin=1")],
            TEConfig("delayed", "hybrid", 16, "most_recent", 1),
        ),
        (
            "fp8_delayed",
            ["dgrad.grad_output.format=e4m3", "wgrad.grad_output.format=e4m3"],
            TEConfig("delayed", "e4m3", 1024, "max"),
        ),
        ("fp8_current", all_operands("scale_rule=amax_pow2"), TEConfig("tensorwise", "hybrid", power_of_two=True)),
        ("fp8_blockwise", all_operands("scale_rule=amax_pow2"), TEConfig("blockwise", power_of_two=True)),
        ("fp8_blockwise", ["keep_bf16.last_layers=2"], TEConfig("blockwise", last_layers=2)),
        ("fp8_blockwise", operands_of("grad_output", "format=e5m2"), TEConfig("blockwise", "hybrid")),
    ],
)
def test_fields_that_transformer_engine_leaves_open(name: str, changes: list[str], expected: TEConfig) -> None:
    recipe = load_recipe(name, changes)
    assert te_config(recipe) == find_te_config(recipe) == expected


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fp8_delayed", ["fprop.input.margin=1"]),  # one operand alone
        ("fp8_delayed", ["keep_bf16.first_layers=1"]),
        ("fp8_delayed", all_operands("scale_rule=amax_pow2")),
        ("fp8_current", ["wgrad.input=null", "wgrad.grad_output=null"]),
        ("fp8_current", ["fprop.fast_accumulation=false"]),
        ("fp8_current", ["keep_bf16.names=['*.linear_fc1']"]),
        ("fp8_current", all_operands("amax_floor=1.0e-12")),
        ("fp8_current", [f"{gemm}.{operand}=null" for gemm in ("dgrad", "wgrad") for operand in BACKWARD[gemm]]),
        ("fp8_current", ["fprop.input.format=e5m2"]),
        ("fp8_current", ["dgrad.grad_output.format=e4m3"]),  # wgrad's stays
        ("fp8_current", operands_of("weight", "scale_rule=amax_pow2")),
        ("fp8_blockwise", operands_of("weight", "granularity=1x128")),
        ("mxfp8", operands_of("weight", "granularity=32x32")),
    ],
)
def test_a_field_that_transformer_engine_lacks_is_refused(name: str, changes: list[str]) -> None:
    with pytest.raises(UserError, match="does not run with TransformerEngine's layers"):
        te_config(load_recipe(name, changes))
    assert find_te_config(load_recipe(name, changes)) is None


@pytest.mark.parametrize(
    ("recipe", "power_of_two", "fp32_blocks"),
    [
        (TEConfig(), "0", "0"),
        (TEConfig("tensorwise", power_of_two=True), "1", "0"),
        (TEConfig("blockwise"), "0", "1"),
        (TEConfig("blockwise", power_of_two=True), "0", "0"),
    ],
)
def test_scales_follow_the_recipe_and_no_environment_variable(
    recipe: TEConfig, power_of_two: str, fp32_blocks: str
) -> None:
    assert recipe.environment() == {
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": power_of_two,
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": fp32_blocks,
    }


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (TEConfig(), ""),
        (
            TEConfig("tensorwise", "hybrid", power_of_two=True, last_layers=2),
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1 --fp8-format hybrid --fp8-recipe tensorwise "
            "--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 2",
        ),
        (
            TEConfig("delayed", "e4m3", 16, "most_recent", 1),
            "--fp8-format e4m3 --fp8-recipe delayed --fp8-margin 1 --fp8-amax-history-len 16 "
            "--fp8-amax-compute-algo most_recent",
        ),
    ],
)
def test_flags_of_megatron_lm(config: TEConfig, flags: str) -> None:
    assert config.flags() == flags
