"""GEMMs that a GPU runs natively, and accumulators that are emulated elsewhere."""

from dataclasses import replace

import pytest

from megatron_lowprec import UserError, get_recipe
from megatron_lowprec.linear.backends.emulated.why_not import check_accumulator, fast_gemms
from megatron_lowprec.linear.backends.table import choose, native_gemms
from megatron_lowprec.linear.backends.target import Target


@pytest.mark.parametrize(
    ("recipe", "arch", "native"),
    [
        ("fp8_delayed", "cpu", ""),
        ("fp8_delayed", "sm80", ""),
        ("fp8_delayed", "sm89", "fprop dgrad wgrad"),
        ("fp8_rowwise", "sm89", ""),
        ("fp8_rowwise", "sm90", "fprop dgrad wgrad"),
        ("fp8_rowwise_gw_hp", "sm90", "fprop dgrad"),
        ("fp8_blockwise", "sm90", "fprop dgrad wgrad"),
        ("fp8_blockwise", "sm100", ""),
        ("mxfp8", "sm90", ""),
        ("fp8_mxfp4_rht_sr", "sm90", "fprop"),
        ("bf16", "sm90", ""),
    ],
)
def test_native_gemms(recipe: str, arch: str, native: str) -> None:
    assert native_gemms(get_recipe(recipe), Target(arch, 256, 384)) == set(native.split())


def test_sizes_that_fp8_products_cannot_take() -> None:
    recipe = get_recipe("fp8_blockwise")
    assert (
        native_gemms(recipe, Target("sm90", 256, 200)) == set()
    )  # dgrad contracts 200, and columns must be multiples of 16
    assert native_gemms(recipe, Target("sm90", 256, 208)) == {"fprop", "wgrad"}
    assert native_gemms(recipe, Target("sm90", 208, 256)) == {"dgrad", "wgrad"}
    found = choose("fprop", recipe.fprop, Target("sm90", 200, 256))
    assert found == ("emulated", False, (("hopper_fp8", "in_features 200 is no multiple of 16"),))


@pytest.mark.parametrize(
    ("name", "arch", "fast", "words"),
    [
        ("bf16", "cpu", "", "no GEMM of recipe bf16 has fast_accumulation; leave it out, or set --recipe-override"),
        ("fp8_blockwise", "cpu", "", "no GEMM of recipe fp8_blockwise has fast_accumulation"),
        ("fp8_blockwise", "cpu", "fprop", "operands of granularity 1x128 are promoted to fp32 every 128 terms"),
        ("mxfp8", "cpu", "wgrad", "wgrad of recipe mxfp8: no MX GEMM on sm90; .*wgrad.fast_accumulation=false"),
        ("fp8_delayed", "sm90", "", "fprop may run on this GPU's own FP8 units; add --emulate"),
    ],
)
def test_accumulators_that_cannot_be_emulated(name: str, arch: str, fast: str, words: str) -> None:
    recipe = get_recipe(name)
    if fast:
        recipe = replace(recipe, **{fast: replace(recipe.gemms[fast], fast_accumulation=True)})
    with pytest.raises(UserError, match=words):
        check_accumulator(recipe, arch)


def test_accumulators_that_can_be_emulated() -> None:
    for name in ("fp8_delayed", "fp8_current_bf16_ends", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_lm"):
        check_accumulator(get_recipe(name), "cpu")
        assert fast_gemms(get_recipe(name)) == ["fprop"]
    check_accumulator(get_recipe("fp8_rowwise"), "sm89")  # Ada has no GEMM of row scales
