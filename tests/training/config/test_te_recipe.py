"""Which recipes TransformerEngine shares, and what Megatron-core is told for each."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lowprec import recipes
from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.config.te_recipe import TERecipe, check, te_recipe
from tests.training.helpers import argv

OPERANDS = (
    "fprop.input",
    "fprop.weight",
    "dgrad.grad_output",
    "dgrad.weight",
    "wgrad.grad_output",
    "wgrad.input",
)
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
}


def all_operands(field: str) -> list[str]:
    return [f"{operand}.{field}" for operand in OPERANDS]


@pytest.mark.parametrize("name", recipes())
def test_shared_recipes_are_megatron_s_fields_and_others_are_refused(name: str) -> None:
    recipe = load_recipe(name, [])
    if name in SHARED:
        assert te_recipe(recipe).transformer_config() == SHARED[name]
        return
    with pytest.raises(UserError) as error:
        te_recipe(recipe)
    assert ", ".join(sorted(SHARED, key=recipes().index)) in str(error.value)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "fp8_delayed",
            [*all_operands("history=16"), *all_operands("history_rule=most_recent"), *all_operands("margin=1")],
            TERecipe("delayed", "hybrid", 16, "most_recent", 1),
        ),
        (
            "fp8_delayed",
            ["dgrad.grad_output.format=e4m3", "wgrad.grad_output.format=e4m3"],
            TERecipe("delayed", "e4m3", 1024, "max"),
        ),
        ("fp8_current", all_operands("scale_rule=amax_pow2"), TERecipe("tensorwise", "hybrid", power_of_two=True)),
        ("fp8_blockwise", all_operands("scale_rule=amax_pow2"), TERecipe("blockwise", power_of_two=True)),
        ("fp8_blockwise", ["keep_bf16.last_layers=2"], TERecipe("blockwise", last_layers=2)),
    ],
)
def test_fields_that_transformer_engine_leaves_open(name: str, changes: list[str], expected: TERecipe) -> None:
    assert te_recipe(load_recipe(name, changes)) == expected


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
        ("fp8_current", ["fprop.input.format=e5m2"]),
        ("fp8_current", ["dgrad.grad_output.format=e4m3"]),  # wgrad's stays
        ("fp8_blockwise", ["dgrad.grad_output.format=e5m2", "wgrad.grad_output.format=e5m2"]),
        ("fp8_blockwise", ["fprop.weight.granularity=1x128"]),
    ],
)
def test_a_field_that_transformer_engine_lacks_is_refused(name: str, changes: list[str]) -> None:
    with pytest.raises(UserError, match="does not exist in TransformerEngine"):
        te_recipe(load_recipe(name, changes))


@pytest.mark.parametrize(
    ("recipe", "power_of_two", "fp32_blocks"),
    [
        (TERecipe(), "0", "0"),
        (TERecipe("tensorwise", power_of_two=True), "1", "0"),
        (TERecipe("blockwise"), "0", "1"),
        (TERecipe("blockwise", power_of_two=True), "0", "0"),
    ],
)
def test_the_recipe_and_no_one_s_environment_decides_about_scales(
    recipe: TERecipe, power_of_two: str, fp32_blocks: str
) -> None:
    assert recipe.environment() == {
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": power_of_two,
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": fp32_blocks,
    }


def model(**changes: Any) -> Config:
    return resolve_model(parse(argv(**changes))[0])


@pytest.mark.parametrize(
    ("changes", "recipe_override", "words"),
    [
        ({"hidden_size": 72}, [], ["72 input features", "multiple of 16"]),
        ({"ffn_hidden_size": 96, "tensor_model_parallel_size": 4, "num_attention_heads": 4}, [], ["linear_fc1", "24"]),
        ({"num_layers": 4, "pipeline_model_parallel_size": 2}, ["keep_bf16.first_layers=3"], ["2 layers", "first 3"]),
    ],
)
def test_sizes_that_its_products_do_not_take_are_refused(
    changes: dict[str, Any], recipe_override: list[str], words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        check(model(**changes), load_recipe("fp8_current", recipe_override))
    assert [word for word in words if word not in str(error.value).replace("3 first", "first 3")] == []


def test_bf16_takes_any_size() -> None:
    assert check(model(hidden_size=72), load_recipe("bf16", [])) == TERecipe()
