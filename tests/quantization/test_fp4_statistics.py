"""What the FP4 family promises on average, and what its scales cost. All seeds are fixed, as in test_statistics."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowprec import QuantSpec, RandomStream, quantize
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from tests.linear.test_fp4_family import EDEN, NVFP4
from tests.quantization.test_statistics import rms, z_scores
from tests.refusal import refused

STREAM = RandomStream((1, 2))


def drawn(spec: QuantSpec, **scale: Any) -> QuantSpec:
    return replace(spec, rounding="stochastic", scale=replace(spec.scale, **scale))


def slope(q: torch.Tensor, x: torch.Tensor) -> float:
    """<q, x> / <x, x>: 1 of an unbiased q."""
    return float((q.double() * x.double()).sum() / x.double().square().sum())


def test_stochastic_rounding_under_e4m3_scales_is_not_exactly_unbiased(generator: torch.Generator) -> None:
    """A scale that was rounded down saturates its block's largest entry; a target of 16/17 of 6 leaves room for it.

    Half a million Gaussian entries, each with a spread of 0.15 of a standard deviation: 2.1e-4 of the slope. A product
    of two such operands has the square, 0.993.
    """
    x = torch.randn(512, 1024, generator=generator)
    plain = slope(quantize(x, drawn(NVFP4), random=STREAM).dequantize(), x)
    assert abs(plain - 0.9965) < 0.00075
    room = drawn(replace(NVFP4, tensor_scale=TensorScaleSpec(448 * 96 / 17)), block_target=96 / 17)
    assert abs(slope(quantize(x, room, random=STREAM).dequantize(), x) - 1.0) < 0.00075


@pytest.mark.parametrize(
    "spec",
    [
        drawn(replace(NVFP4, tensor_scale=TensorScaleSpec(448 * 96 / 17)), block_target=96 / 17),
        drawn(QuantSpec("e2m1", "1x32", "e8m0", "round_up")),
        drawn(replace(NVFP4, scale=ScaleSpec("1x16", "ue5m3", "product", zero_code="one")), block_target=96 / 17),
        drawn(replace(NVFP4, scale=ScaleSpec("1x16", "e4m3", "base")), block_target=96 / 17),
    ],
    ids=["room", "tetrajet", "ue5m3", "base"],
)
def test_where_nothing_saturates_every_entry_is_unbiased(spec: QuantSpec, generator: torch.Generator) -> None:
    x = torch.randn(64, generator=generator)
    q = quantize(x.expand(16384, 64), spec, random=STREAM).dequantize(torch.float64)
    z = z_scores(q, x.double())
    assert len(z) >= 56
    assert rms(z) < 1.4  # mean of >= 56 squares: 1 +- 0.19, and 1.96 is 5 sd


def test_a_scale_of_one_in_place_of_zero_keeps_small_blocks_on_average() -> None:
    """Under the scale 0 a block is lost; under 1 its entries of 2^-9 steps are rounded up for one draw in 512."""
    x = torch.zeros(8192, 32)
    x[:, 0] = 2688.0  # the tensor scale is 1
    x[:, 16:] = 2.0**-10
    one = quantize(x, drawn(NVFP4, zero_code="one"), random=STREAM).dequantize()[:, 16:]
    lost = quantize(x, drawn(NVFP4), random=STREAM).dequantize()[:, 16:]
    assert lost.count_nonzero() == 0
    # 131072 draws that give 0.5 for one in 512: 16 standard errors from 0
    assert abs(float(one.mean()) * 2.0**10 - 1.0) < 5 / 16


@pytest.mark.parametrize("outliers", [1.0, 8.0])
def test_eden_with_random_signs_is_unbiased_to_a_thousandth(outliers: float, generator: torch.Generator) -> None:
    """Over 4096 rotations of one vector of 128; one has a slope of 1 +- 0.011, their mean an error of 1.8e-4.

    The published sums weigh blocks in units of their own scales: the slope is 6e-4 below 1 for a Gaussian vector and
    1e-3 above it for one with outliers. Without a correction the Gaussian one is more than 5e-3 below.
    """
    x = torch.randn(128, generator=generator) * torch.tensor([1.0, outliers]).repeat(64)
    signs, ones = 1.0 - 2.0 * torch.randint(0, 2, (4096, 128), generator=generator), torch.ones(128)
    rotated = hadamard_transform(x * signs, ones)

    def back(spec: QuantSpec) -> torch.Tensor:
        q = quantize(rotated, spec, random=STREAM, group=128).dequantize()
        return (hadamard_transform(q, ones) * signs).double()

    eden = back(EDEN)
    assert abs(slope(eden.mean(dim=0), x) - 1.0) < 1e-3 + 3 * 1.8e-4
    if outliers > 1.0:  # signs and one Hadamard matrix do not make its single entries Gaussian
        return
    assert rms(z_scores(eden, x.double())) < 1.4  # mean of 128 squares: 1 +- 0.13, and 1.96 is 8 sd
    nearest = back(replace(EDEN, correction=None, scale=replace(EDEN.scale, rounding="nearest_even")))
    assert slope(nearest.mean(dim=0), x) < 1.0 - 5e-3


def test_a_corrected_scale_is_rounded_without_bias(generator: torch.Generator) -> None:
    """Blocks alike have one factor, with which <v, q> is <v, v> on average over the scales' draws."""
    x = torch.randn(16, generator=generator).repeat(8).expand(4096, 128)

    def of(rounding: Any) -> float:
        spec = replace(EDEN, scale=replace(EDEN.scale, rounding=rounding))
        return slope(quantize(x, spec, random=STREAM, group=128).dequantize(), x)

    # a step of a scale is at most 1/8 of it: an error of 1/16, over 8 * 4096 draws
    assert abs(of("stochastic") - 1.0) < 3 / 16 / math.sqrt(8 * 4096)
    assert abs(of("nearest_even") - 1.0) > 6 / 16 / math.sqrt(8 * 4096)


@pytest.mark.parametrize("measure", ["mse", "mae", "abs_max"])
@pytest.mark.parametrize("granularity", ["1x16", "4x16"])
def test_four_over_six_has_the_lower_error_of_both_in_each_block(
    measure: Any, granularity: str, generator: torch.Generator
) -> None:
    x = torch.randn(64, 128, generator=generator)
    scale = ScaleSpec(granularity, "e4m3", "base")
    row = replace(NVFP4, scale=scale, tensor_scale=TensorScaleSpec(1536.0))
    at_four = replace(row, scale=replace(scale, block_target=4.0))
    chosen = replace(row, scale=replace(scale, four_over_six=measure))

    def error(spec: QuantSpec) -> torch.Tensor:
        d = (quantize(x, spec).dequantize() - x).double().abs()
        rows, columns = (int(size) for size in granularity.split("x"))
        blocks = d.view(64 // rows, rows, -1, columns).transpose(1, 2).flatten(2)
        return blocks.amax(2) if measure == "abs_max" else (blocks.square() if measure == "mse" else blocks).sum(2)

    six, four, best = error(row), error(at_four), error(chosen)
    # the scale at four is rounded from 1.5 times the number at six: one fp32 rounding from A / 4
    assert torch.allclose(best, torch.minimum(six, four), rtol=1e-5)
    assert 0.02 < float((best < six).float().mean()) < 0.98


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_candidates_take_their_own_of_two_draws_along_any_axis(rounding: Any, generator: torch.Generator) -> None:
    """For elements, and for scales that are drawn."""
    x, draws = torch.randn(32, 48, generator=generator), torch.rand(2, 32, 48, generator=generator)
    scale = ScaleSpec("1x16", "e4m3", "base", rounding=rounding)
    row = replace(NVFP4, scale=scale, tensor_scale=TensorScaleSpec(1536.0))
    spec = drawn(row, four_over_six="mse")
    q = quantize(x, spec, random=draws)
    turned = quantize(x.t().contiguous(), spec, axis=0, random=draws.transpose(1, 2).contiguous())
    assert torch.equal(turned.dequantize(), q.dequantize().t())
    first, second = (
        quantize(x, drawn(row, block_target=largest), random=own).dequantize()
        for largest, own in ((6.0, draws[0]), (4.0, draws[1]))
    )
    blocks = [each.unflatten(1, (-1, 16)) for each in (q.dequantize(), first, second)]
    of_first, of_second = ((blocks[0] == other).all(2) for other in blocks[1:])
    assert (of_first | of_second).all()
    assert (of_first & ~of_second).any()
    assert (of_second & ~of_first).any()


def test_a_corrected_scale_takes_the_first_of_two_draws(generator: torch.Generator) -> None:
    x, draws = torch.randn(4, 128, generator=generator), torch.rand(2, 4, 128, generator=generator)
    two, first = (quantize(x, drawn(EDEN), random=random, group=128) for random in (draws, draws[0]))
    assert torch.equal(two.dequantize(), first.dequantize())


@pytest.mark.parametrize(("four_over_six", "draws"), [(None, 3), ("mse", 1), ("mse", 3)])
def test_as_many_draws_as_candidates(four_over_six: Any, draws: int) -> None:
    spec = drawn(replace(NVFP4, tensor_scale=TensorScaleSpec(256.0 * 6.0)), rule="base", four_over_six=four_over_six)
    with refused(f"quantize got draws of shape ({draws}, 2, 32) for a tensor of (2, 32)"):
        quantize(torch.ones(2, 32), spec, random=torch.zeros(draws, 2, 32))
