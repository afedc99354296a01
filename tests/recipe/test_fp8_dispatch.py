"""Recipes whose tokens can travel to their experts as codes, reasons of the others, and bytes."""

from dataclasses import replace

import pytest

from megatron_lowprec import UserError, get_recipe
from megatron_lowprec.recipe.fp8_dispatch import check_fp8_dispatch, dispatched_bytes, why_not_dispatched
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.registry import FP8_1X128, FP8_ROW, MXFP4, MXFP8, recipes
from megatron_lowprec.recipe.schema import HadamardSpec

DISPATCHED = {"fp8_blockwise", "fp8_rowwise", "deepseek_v3", "deepseek_v32"} | {
    name for name in recipes() if name.startswith("mxfp8")
}


def with_input(**fields: object) -> Recipe:
    """fp8_blockwise with these fields of fprop's input."""
    recipe = get_recipe("fp8_blockwise")
    return replace(recipe, fprop=replace(recipe.fprop, input=replace(FP8_1X128, **fields)))  # type: ignore[arg-type]


def test_recipes_that_send_codes() -> None:
    assert {name for name in recipes() if why_not_dispatched(get_recipe(name)) is None} == DISPATCHED


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bf16", "fprop takes input in the compute dtype"),
        ("mxfp4_rht_sr", "fprop takes input in the compute dtype"),
        ("fp8_delayed", "input has a delayed scale per expert, whose history only the ranks of that expert have"),
        ("fp8_lm", "input has a delayed scale per expert"),
        ("fp8_mxfp4_rht_sr", "input has a delayed scale per expert"),
        ("fp8_current", "the current scale of input needs the amax of all tokens of an expert before the cast"),
        ("fp8_rowwise_gw_hp", "wgrad takes input in the compute dtype, which would be rounded before"),
    ],
)
def test_refused_recipes(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"in recipe {name} {reason}"):
        check_fp8_dispatch(get_recipe(name))


def test_gradients_that_travel_as_codes() -> None:
    assert all(why_not_dispatched(get_recipe(name), "grad_output") is None for name in DISPATCHED)
    for name, reason in (
        ("bf16", "dgrad takes grad_output in the compute dtype"),
        ("mxfp4", None),
        ("mxfp4_sr", "grad_output is rounded stochastically, by draws for a token's row in its expert"),
        ("mxfp4_rht", "dgrad takes grad_output after a Hadamard transform"),
        ("fp8_delayed", "grad_output has a delayed scale per expert, whose history only the ranks of that expert have"),
        ("fp8_rowwise_gw_hp", "wgrad takes grad_output in the compute dtype, which would be rounded before"),
    ):
        assert why_not_dispatched(get_recipe(name), "grad_output") == reason


def test_other_reasons() -> None:
    for recipe, reason in (
        (with_input(granularity="128x128"), "input has blocks of 128x128, which span tokens"),
        (with_input(rounding="stochastic"), "input is rounded stochastically"),
        (
            with_input(scale=ScaleSpec("1x16", "e4m3", "product"), tensor_scale=TensorScaleSpec(2688.0, "1x128")),
            "input has scales of outer blocks, and only those of blocks travel with a token",
        ),
        (with_input(format="e5m6"), "input has codes of 12 bits in e5m6, and a code travels as one byte"),
    ):
        with pytest.raises(UserError, match=reason):
            check_fp8_dispatch(recipe)
    transformed = replace(with_input(), fprop=replace(with_input().fprop, hadamard=HadamardSpec()))
    assert why_not_dispatched(transformed) == "fprop takes input after a Hadamard transform"


def test_bytes_of_a_token() -> None:
    """Hidden size 2048; bf16 has 4096 bytes."""
    assert dispatched_bytes(FP8_1X128, 2048) == 2048 + 16 * 4
    assert dispatched_bytes(replace(FP8_1X128, scale_rule="amax_pow2"), 2048) == 2048 + 16
    assert dispatched_bytes(FP8_ROW, 2048) == 2048 + 1
    assert dispatched_bytes(MXFP8, 2048) == 2048 + 64
    assert dispatched_bytes(MXFP4, 2048) == 1024 + 64
