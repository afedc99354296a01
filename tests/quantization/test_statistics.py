"""What the algorithms promise on average, and the signal-to-noise ratios that they are known to have.

All seeds are fixed: a bound that holds once holds always. Bounds on z-scores are those of a fair source.
"""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron_lowprec import QuantSpec, RandomStream, get_recipe, quantize
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.registry import MXFP4, MXFP4_SR, MXFP8, MXFP8_OCP
from tests.weekly import also_weekly

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
DRAWS = 131_072


def z_scores(samples: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """(mean over the first dimension - truth) in standard errors; entries that no draw moves are left out."""
    spread = samples.std(dim=0)
    moved = spread > 0
    return ((samples.mean(dim=0) - truth) / (spread / math.sqrt(samples.shape[0])))[moved]


def rms(z: torch.Tensor) -> float:
    return float(z.square().mean().sqrt())


def block(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(32, generator=generator)
    x[7] = 3.9  # the block's largest: just below 4, where the floor rule without headroom would saturate
    return x.to(dtype)


@dtypes
def test_algorithm_2_is_unbiased(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = block(dtype, generator)
    q = quantize(x.expand(DRAWS, 32), MXFP4_SR, random=RandomStream((1, 2))).dequantize(torch.float64)
    z = z_scores(q, x.double())
    assert len(z) >= 30
    assert float(z.abs().max()) < 5
    assert rms(z) < 1.6  # mean of >= 30 squares: 1 +- 0.26, and 2.56 is 6 sd


@dtypes
def test_algorithm_1_is_seen_to_be_biased_by_the_same_test(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = block(dtype, generator)
    q = quantize(x.expand(DRAWS, 32), MXFP4_SR, random=RandomStream((1, 2))).dequantize(torch.float64)
    nearest = quantize(x.expand(2, 32), MXFP4).dequantize(torch.float64)[:1]
    z = (nearest[0] - x.double()) / (q.std(dim=0) / math.sqrt(DRAWS))
    assert rms(z[z.isfinite()]) > 50


def test_without_headroom_stochastic_rounding_is_seen_to_be_biased(generator: torch.Generator) -> None:
    """The block's largest entry saturates at 3 (6 / 2): what 3/4 is for."""
    x = block(torch.float32, generator)
    q = quantize(x.expand(DRAWS, 32), replace(MXFP4_SR, headroom=1.0), random=RandomStream((1, 2)))
    samples = q.dequantize(torch.float64)
    assert samples[:, 7].unique().tolist() == [3.0]
    others = [i for i in range(32) if abs(x[i].item()) < 3]
    assert rms(z_scores(samples[:, others], x.double()[others])) < 1.6


def test_one_random_bit_is_unbiased_only_to_a_quarter_step(generator: torch.Generator) -> None:
    x = block(torch.float32, generator)
    few = quantize(x.expand(DRAWS, 32), replace(MXFP4_SR, random_bits=1), random=RandomStream((1, 2)))
    error = (few.dequantize(torch.float64).mean(dim=0) - x.double()).abs()
    # scale 1/2, largest step 2, headroom 3/4: a quarter step is at most 1/3; noise of a mean is below 0.01
    assert float(error.max()) < 1 / 3 + 0.01
    assert float(error.max()) > 0.05


def linear_gemms(name: str) -> LinearGemms:
    return LinearGemms(get_recipe(name), LinearId(1, "linear"), 1234, AmaxHistory)


T, OUT, IN, CALLS = 64, 64, 32, 600  # 600 x (64 x 64 + 64 x 32) draws for each GEMM: 3.7 million


def gemm_samples(name: str, gemm: str, dtype: torch.dtype, calls: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(77)
    x, w, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in ((T, IN), (OUT, IN), (T, OUT)))
    run = linear_gemms(name)
    if gemm == "dgrad":
        truth = dy.double() @ w.double()
        samples = [run.dgrad(dy, w, RngStep(step, 0)) for step in range(calls)]
    else:
        truth = dy.double().t() @ x.double()
        samples = [run.wgrad(dy, x, RngStep(step, 0)) for step in range(calls)]
    return torch.stack(samples).double(), truth


PRODUCTS = list(product(("mxfp4_sr", "mxfp4_rht_sr"), ("dgrad", "wgrad"), ("float32", "bfloat16")))
# every pair of two of a product's properties
EACH_TIME = ("mxfp4_sr-dgrad-float32", "mxfp4_sr-wgrad-bfloat16", "mxfp4_rht_sr-dgrad-bfloat16")
EACH_TIME += ("mxfp4_rht_sr-wgrad-float32",)


@pytest.mark.parametrize(("name", "gemm", "dtype"), also_weekly(PRODUCTS, EACH_TIME))
def test_backward_products_are_unbiased(name: str, gemm: str, dtype: str) -> None:
    """Algorithm 3 needs RHT and independent noise in both operands, and 16/9 in fp32."""
    samples, truth = gemm_samples(name, gemm, getattr(torch, dtype), CALLS)
    z = z_scores(samples, truth)
    assert z.numel() == truth.numel()
    assert float(z.abs().max()) < 5.2  # 2048 entries
    assert 0.85 < rms(z) < 1.15  # entries share operands, so they are worth some 128 independent ones: sd 0.06 of rms
    # slope of the mean against the truth: its standard error is noise / signal / sqrt(calls x entries), about 3e-4
    slope = float((samples.mean(0) * truth).sum() / truth.square().sum())
    assert abs(slope - 1) < 2e-3


def test_algorithm_1_products_are_seen_to_be_biased_by_the_same_test() -> None:
    spread = gemm_samples("mxfp4_rht_sr", "dgrad", torch.float32, 50)[0].std(dim=0)
    nearest, truth = gemm_samples("mxfp4", "dgrad", torch.float32, 2)
    z = (nearest[0] - truth) / (spread / math.sqrt(CALLS))
    assert rms(z) > 10
    slope = float((nearest[0] * truth).sum() / truth.square().sum())
    assert 0.93 < slope < 0.98  # 0.9804 squared is 0.961: two operands of NUMERICS' slope


def test_rht_signs_change_from_call_to_call() -> None:
    samples, _ = gemm_samples("mxfp4_rht", "dgrad", torch.float32, 3)  # rounds to nearest: only signs can differ
    assert not torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[1], samples[2])


@pytest.mark.parametrize(
    ("spec", "decibel"),
    [
        # float64 simulations with the same definitions, sigma 1
        (MXFP4, 18.79),
        (replace(MXFP4, scale_rule="round_up"), 18.76),
        (MXFP4_SR, 15.50),
        (MXFP8_OCP, 30.65),
        (MXFP8, 31.53),
    ],
    ids=["mxfp4-floor", "mxfp4-round_up", "algorithm-2", "mxfp8-floor", "mxfp8-round_up"],
)
def test_signal_to_noise_ratio_of_gaussians(spec: QuantSpec, decibel: float, generator: torch.Generator) -> None:
    x = torch.randn(1024, 1024, generator=generator)
    error = quantize(x, spec, random=RandomStream((1, 2))).dequantize() - x
    snr = 10 * math.log10(float(x.double().square().sum() / error.double().square().sum()))
    assert abs(snr - decibel) < 0.02  # rounding of the figure 0.005; sampling of a million entries below 0.01


def test_slopes_of_gaussians(generator: torch.Generator) -> None:
    x = torch.randn(1024, 1024, generator=generator)

    def slope(spec: QuantSpec) -> float:
        q = quantize(x, spec, random=RandomStream((1, 2))).dequantize(torch.float64)
        return float((q * x).sum() / x.double().square().sum())

    assert abs(slope(MXFP4) - 0.9804) < 5e-4
    assert abs(slope(MXFP4_SR) - 1) < 1e-3  # standard error 10^(-15.5 / 20) / 1024 = 1.6e-4


@pytest.mark.parametrize("sigma", [1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75])
def test_algorithm_1_clips_some_entries_and_algorithm_2_none(sigma: float, generator: torch.Generator) -> None:
    x = torch.randn(512, 1024, generator=generator) * sigma
    q = quantize(x, MXFP4)
    amax = x.view(512, 32, 32).abs().amax(-1, keepdim=True)
    largest = 6 * torch.exp2(amax.log2().floor() - 2)
    clipped = float((x.view(512, 32, 32).abs() > largest).float().mean())
    assert 0.0163 - 5e-4 < clipped < 0.0335 + 5e-4  # over all sigma, as measured; sampling error 2e-4
    assert q.elements.view(512, 32, 32)[x.view(512, 32, 32).abs() > largest].abs().unique().tolist() == [6.0]
    scaled = 0.75 * x.view(512, 32, 32).abs() / torch.exp2(amax.log2().floor() - 2)
    assert float(scaled.max()) <= 6.0
