"""Recipes whose codes tensor-parallel ranks can gather, and reasons of the others."""

from dataclasses import replace

import pytest

from megatron_lowprec import Recipe, UserError, get_recipe, recipes
from megatron_lowprec.recipe.coverage import check_fp8_gather, why_not_gathered

GATHERED = {"fp8_delayed", "fp8_lm", "fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3"}


def test_recipes_whose_codes_can_be_gathered() -> None:
    for name in recipes():
        reasons = [why_not_gathered(get_recipe(name), tensor) for tensor in ("input", "grad_output")]
        assert (reasons == [None, None]) == (name in GATHERED), (name, reasons)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bf16", "fprop takes input in the compute dtype"),
        ("fp8_current", "the current scale of input needs the amax over all ranks before the cast"),
        ("fp8_rowwise", "input has a scale per row, which in wgrad spans the tokens of all ranks"),
        ("fp8_rowwise_gw_hp", "wgrad takes input in the compute dtype"),
        ("fp8_blockwise", "input has blocks of 1x128: wgrad takes other codes than fprop, in blocks of tokens"),
        ("mxfp8", "input has blocks of 1x32: wgrad takes other codes than fprop, in blocks of tokens"),
        ("mxfp4_rht_sr", "fprop takes input in the compute dtype"),
        ("fp8_mxfp4_rht_sr", "wgrad takes input after a Hadamard transform"),
    ],
)
def test_recipes_whose_codes_cannot_be_gathered_are_refused(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"in recipe {name} {reason}: use fp8_delayed"):
        check_fp8_gather(get_recipe(name))


def delayed(**fields: str) -> Recipe:
    """fp8_delayed with these fields of its output gradient in both GEMMs."""
    recipe = get_recipe("fp8_delayed")
    spec = replace(recipe.dgrad.grad_output, **fields)  # type: ignore[type-var, arg-type]
    dgrad, wgrad = (replace(gemm, grad_output=spec) for gemm in (recipe.dgrad, recipe.wgrad))
    return replace(recipe, dgrad=dgrad, wgrad=wgrad)


def test_reasons_against_gathering_codes() -> None:
    check_fp8_gather(delayed(format="e4m3"))
    for fields, reason in (
        ({"format": "e2m3"}, "grad_output is e2m3, not FP8"),
        ({"rounding": "stochastic"}, "grad_output is rounded stochastically"),
        ({"scaling": "current"}, "the current scale of grad_output"),
    ):
        with pytest.raises(UserError, match=reason):
            check_fp8_gather(delayed(**fields))
    apart = delayed(format="e4m3")
    apart = replace(apart, wgrad=get_recipe("fp8_delayed").wgrad)
    with pytest.raises(UserError, match="dgrad and wgrad quantize grad_output differently"):
        check_fp8_gather(apart)


def test_scales_that_change_before_the_backward_pass_of_a_pipeline() -> None:
    moving = delayed(history_update="microbatch")
    check_fp8_gather(moving)
    with pytest.raises(UserError, match="history_update microbatch"):
        check_fp8_gather(moving, pipeline_parallel=2)
