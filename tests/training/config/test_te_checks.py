"""A model's sizes against those that TransformerEngine's FP8 products need."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.te.te_config import TEConfig
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model
from megatron_lowprec.training.config.te_checks import check, prepare
from tests.training.helpers import argv


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
    assert check(model(hidden_size=72), load_recipe("bf16", [])) == TEConfig()


def test_mxfp8_needs_blocks_of_32() -> None:
    with pytest.raises(UserError, match="no multiple of 32"):
        check(model(hidden_size=80), load_recipe("mxfp8", []))
    assert check(model(hidden_size=80), load_recipe("fp8_current", [])).kind == "tensorwise"


def test_fp8_weights_in_host_memory_are_refused() -> None:
    fp8 = {"use_distributed_optimizer": True, "bf16": True, "fp8_param_gather": True}
    with pytest.raises(UserError, match="--use-cpu-initialization creates in host memory"):
        check(model(use_cpu_initialization=True, **fp8), load_recipe("fp8_current", []))
    assert check(model(**fp8), load_recipe("fp8_current", [])).kind == "tensorwise"


def test_a_backward_pass_overridden_by_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    config = model(transformer_impl="transformer_engine")
    with pytest.raises(UserError, match="NVTE_BACKWARD_OVERRIDE=high_precision"):
        prepare(config, load_recipe("fp8_current", []))
