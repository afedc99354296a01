"""Recipes whose weights can be kept as FP8 alone, and reasons of the others."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_lowprec import GemmSpec, get_recipe, recipes
from megatron_lowprec.recipe.coverage import check_primary_weights, primary_weight_spec
from megatron_lowprec.recipe.registry import FP8_128X128, FP8_128X128_POW2, FP8_CURRENT, FP8_DELAYED
from tests.refusal import refused


def test_recipes_with_primary_weights() -> None:
    for name in recipes():
        weights = get_recipe(name).fprop.weight, get_recipe(name).dgrad.weight
        shared = weights in [(spec, spec) for spec in (FP8_CURRENT, FP8_DELAYED, FP8_128X128, FP8_128X128_POW2)]
        assert (primary_weight_spec(get_recipe(name)) is not None) == shared, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bf16", "fprop unquantized, dgrad unquantized"),
        ("mxfp8", "fprop e4m3 by 1x32, dgrad e4m3 by 1x32"),
        ("fp8_rowwise_gw_hp", "fprop e4m3 by row, dgrad e4m3 by tensor"),
        ("fp8_mxfp4_rht_sr", "fprop e4m3 by tensor, dgrad e2m1 by 1x32"),
    ],
)
def test_recipes_without_primary_weights_are_refused(name: str, words: str) -> None:
    with refused("use the GEMMs of fp8_delayed, fp8_current or fp8_blockwise", match=words):
        check_primary_weights(get_recipe(name))


def test_primary_weights_are_rounded_plainly_and_alike() -> None:
    spec = get_recipe("fp8_current").fprop.weight
    assert spec is not None
    changes: list[dict[str, Any]] = [{"rounding": "stochastic"}, {"headroom": 0.75}, {"format": "e2m1"}]
    changes += [{"granularity": name} for name in ("row", "1x128", "64x64")]
    for change in changes:
        other = replace(spec, **change)
        recipe = replace(get_recipe("fp8_current"), fprop=GemmSpec(weight=other), dgrad=GemmSpec(weight=other))
        assert primary_weight_spec(recipe) is None
        recipe = replace(get_recipe("fp8_current"), fprop=GemmSpec(weight=other))
        assert primary_weight_spec(recipe) is None
