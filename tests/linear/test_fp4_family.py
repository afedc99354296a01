"""Layers under the numerics of the published FP4 recipes, each built of fields, against ``three_gemms``."""

from dataclasses import replace

import pytest
import torch

from megatron_lowprec import GemmSpec, HadamardSpec, QuantSpec, Recipe, quantize
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.lowprec_linear import end_step
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from tests.linear.layers import dtypes, oracle, step, tensors
from tests.linear.test_scale_levels import emulated, gemms_of, layer_of

NVFP4 = QuantSpec("e2m1", "1x16", "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0))
DY = replace(NVFP4, rounding="stochastic", random_bits=8)
RHT = HadamardSpec(16, signs="nvfp4", output="operand")
SIX = QuantSpec(
    "e2m1", scale=ScaleSpec("1x16", "e4m3", "base", four_over_six="mae"), tensor_scale=TensorScaleSpec(1536.0)
)
OVERRIDE = 6 / (17 / 16 * 0.93)
RTN = QuantSpec(
    "e2m1",
    scale=ScaleSpec("1x16", "e4m3", "divided", zero_code="one", four_over_six="mse"),
    tensor_scale=TensorScaleSpec(1536.0),
)
EDEN = QuantSpec(
    "e2m1",
    scale=ScaleSpec("1x16", "e4m3", "divided", "stochastic", block_target=OVERRIDE, zero_code="one"),
    tensor_scale=TensorScaleSpec(255.99 * OVERRIDE),
    correction="eden",
)
UE5M3 = replace(NVFP4, scale=ScaleSpec("1x16", "ue5m3", "product", zero_code="one"))
HELD = replace(UE5M3, scaling="delayed", history=2, history_rule="held")
TETRAJET = QuantSpec("e2m1", "1x32", "e8m0", "round_up")
OUTER = replace(NVFP4, tensor_scale=TensorScaleSpec(2688.0, "1x128"))


def of_three(name: str, x: QuantSpec, w: QuantSpec, dy: QuantSpec, **hadamard: HadamardSpec) -> Recipe:
    return Recipe(
        name,
        "",
        fprop=GemmSpec(input=x, weight=w),
        dgrad=GemmSpec(grad_output=dy, weight=w, hadamard=hadamard.get("dgrad")),
        wgrad=GemmSpec(grad_output=dy, input=x, hadamard=hadamard.get("wgrad")),
    )


AGAIN, ROTATED = replace(EDEN, source="fprop"), HadamardSpec(32)
FAMILY = [
    of_three("nvfp4", NVFP4, replace(NVFP4, granularity="16x16"), DY, wgrad=RHT),
    of_three("four_over_six", SIX, replace(SIX, granularity="16x16"), replace(SIX, rounding="stochastic")),
    Recipe(
        "quartet2",
        "",
        fprop=GemmSpec(input=RTN, weight=RTN),
        dgrad=GemmSpec(grad_output=EDEN, weight=AGAIN, hadamard=ROTATED),
        wgrad=GemmSpec(grad_output=EDEN, input=AGAIN, hadamard=ROTATED),
    ),
    of_three("ue5m3", UE5M3, UE5M3, replace(UE5M3, rounding="stochastic", random_bits=8)),
    of_three("tetrajet", TETRAJET, TETRAJET, replace(TETRAJET, rounding="stochastic")),
    of_three("outer_blocks", OUTER, OUTER, replace(OUTER, rounding="stochastic"), dgrad=HadamardSpec(16), wgrad=RHT),
]
family = pytest.mark.parametrize("recipe", FAMILY, ids=lambda recipe: recipe.name)


@dtypes
@family
def test_a_layer_is_plain_torch(recipe: Recipe, dtype: torch.dtype, generator: torch.Generator) -> None:
    layer, (x, dy) = layer_of(recipe, dtype), tensors(dtype, generator)
    got, want = step(layer, x, dy), oracle(recipe, x, layer.weight.detach(), dy)
    assert all(map(torch.equal, got, want))


@family
def test_products_approach_those_of_the_tensors(recipe: Recipe, generator: torch.Generator) -> None:
    layer, (x, dy) = layer_of(recipe), tensors(torch.float32, generator)
    w = layer.weight.detach()
    for got, exact in zip(step(layer, x, dy), (x @ w.t(), dy @ w, dy.t() @ x), strict=True):
        # one operand's error of rounding to 16 numbers is about 0.1, of stochastic rounding about 0.15
        assert (got - exact).norm() < 0.3 * exact.norm()


def test_a_held_amax_is_that_of_its_turn(generator: torch.Generator) -> None:
    recipe = Recipe("held", "", fprop=GemmSpec(input=HELD, weight=UE5M3))
    layer, (x, dy) = layer_of(recipe), tensors(torch.float32, generator)
    for amax, factor in ((0.0, 1.0), (1.0, 4.0), (1.0, 2.0), (2.0, 1.0)):  # in units of x's own; that in effect
        known = {"input": amax * x.abs().amax()}
        want = oracle(recipe, factor * x, layer.weight.detach(), dy, amaxes=known)
        assert torch.equal(step(layer, factor * x, dy)[0], want[0])
        end_step(layer)


def test_outer_blocks_have_scales_of_their_own(generator: torch.Generator) -> None:
    x = torch.randn(3, 256, generator=generator) * torch.tensor([1.0, 1e-6]).repeat_interleave(128)
    whole = quantize(x, OUTER).validate()
    assert whole.rowwise_tensor_scale is not None
    assert whole.rowwise_tensor_scale.shape == (3, 2)
    for row in range(3):
        for half in (slice(0, 128), slice(128, 256)):
            alone = quantize(x[row : row + 1, half], NVFP4)
            assert torch.equal(whole.dequantize()[row, half], alone.dequantize()[0])


def test_entries_are_rounded_after_the_transform(generator: torch.Generator) -> None:
    gemms, (x, _) = gemms_of(FAMILY[0]), tensors(torch.bfloat16, generator)
    rng_step = RngStep(0, 0)
    operand, _ = emulated(gemms).quantize("input", x, rng_step, CastRequest(False, True, codes=True))
    transform = emulated(gemms).transform("wgrad", rng_step)
    assert transform is not None
    transformed = transform.apply(x.t())
    assert torch.equal(transformed, transformed.bfloat16().float())
    want = quantize(transformed.bfloat16(), NVFP4)
    assert torch.equal(operand.columnwise_data, want.elements)  # type: ignore[arg-type]


def test_a_correction_is_of_the_group_and_not_of_the_tensor(generator: torch.Generator) -> None:
    x, stream = torch.randn(4, 128, generator=generator), RandomStream((1, 2))
    x[0, 0] = 10.0  # the amax of both tensors
    other = x.clone()
    other[:, 32:] = torch.randn(4, 96, generator=generator)
    of_32, of_128 = (
        [quantize(each, EDEN, random=stream, group=group).scale[1:, :2] for each in (x, other)] for group in (32, 128)
    )
    assert torch.equal(*of_32)
    assert not torch.equal(*of_128)
