"""Recipes whose operands the fused MX kernel makes, in layers small enough for an interpreter."""

from dataclasses import replace

from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GemmSpec, HadamardSpec, QuantSpec


def nvfp4_recipe() -> Recipe:
    """TransformerEngine's NVFP4."""
    by_row = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0))
    square, drawn = replace(by_row, granularity="16x16"), replace(by_row, rounding="stochastic")
    return Recipe(
        "nvfp4_here",
        "",
        fprop=GemmSpec(input=by_row, weight=square),
        dgrad=GemmSpec(grad_output=drawn, weight=square),
        wgrad=GemmSpec(grad_output=drawn, input=by_row, hadamard=HadamardSpec(16, signs="nvfp4", output="operand")),
    )


def two_outputs_recipe() -> Recipe:
    """NVFP4 of dy, transformed for both GEMMs: rounded to its dtype after the transform for wgrad only."""
    recipe = nvfp4_recipe()
    assert recipe.dgrad.grad_output is not None
    dgrad = GemmSpec(grad_output=recipe.dgrad.grad_output, hadamard=HadamardSpec(16, signs="nvfp4"))
    wgrad = replace(recipe.wgrad, input=None)
    return Recipe("two_outputs", "", dgrad=dgrad, wgrad=wgrad)


def quartet2_recipe() -> Recipe:
    """Quartet II but for the size of its transform: four-over-six, then corrected scales of fprop's operands."""
    forward = QuantSpec(
        "e2m1",
        scale=ScaleSpec("1x16", "e4m3", "divided", four_over_six="mse", zero_code="one"),
        tensor_scale=TensorScaleSpec(1536.0),
    )
    scale = ScaleSpec("1x16", "e4m3", "divided", "stochastic", block_target=6 / (17 / 16 * 0.93), zero_code="one")
    backward = replace(forward, scale=scale, correction="eden")
    again, transform = replace(backward, source="fprop"), HadamardSpec(32)
    return Recipe(
        "quartet2_here",
        "",
        fprop=GemmSpec(input=forward, weight=forward),
        dgrad=GemmSpec(grad_output=backward, weight=again, hadamard=transform),
        wgrad=GemmSpec(grad_output=backward, input=again, hadamard=transform),
    )
