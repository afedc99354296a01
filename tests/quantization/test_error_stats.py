"""What is said of an operand is what float64 says of the values that its codes and scales stand for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowprec import get_recipe, recipes
from megatron_lowprec.kernels import dispatch
from megatron_lowprec.linear.backends.emulated import cast_plan
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, SIDES, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.error_stats import QuantizationError, error_stats
from megatron_lowprec.quantization.quantizer import quantize, quantize_by_reference
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import as_numbers, block_sizes
from megatron_lowprec.recipe.schema import QuantSpec
from tests.weekly import each_kind


def mxfp4(rounding: str = "nearest_even", headroom: float = 1.0) -> QuantSpec:
    return QuantSpec(
        format="e2m1", granularity="1x32", scale_format="e8m0", scale_rule="floor", rounding=rounding, headroom=headroom
    )


def errors(*fields: float | None) -> QuantizationError:
    return QuantizationError(*fields)  # type: ignore[arg-type]


def fidelity(x: torch.Tensor, spec: QuantSpec) -> QuantizationError:
    made = quantize(x, spec, random=torch.rand(x.shape, generator=torch.Generator().manual_seed(1)))
    return QuantizationError.of(error_stats(x, made).tolist())


def test_values_of_the_format_lose_nothing() -> None:
    x = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).repeat(4, 4)
    assert fidelity(x, mxfp4()) == errors(128, 6.0, None, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)


def test_small_entries_of_a_block_vanish_and_large_ones_are_cut() -> None:
    x = torch.zeros(2, 32)
    x[0, :4] = torch.tensor([7.5, 0.2, -0.1, 1.0])  # scale 1: 7.5 becomes 6, two become 0
    found = fidelity(x, mxfp4())
    assert (found.entries, found.amax) == (64, 7.5)
    assert (found.underflow, found.saturation) == (2 / 4, 1 / 64)
    energy = 7.5**2 + 0.2**2 + 0.1**2 + 1.0
    assert found.snr == pytest.approx(10 * math.log10(energy / (1.5**2 + 0.2**2 + 0.1**2)), rel=1e-6)
    assert found.bias == pytest.approx((6 * 7.5 + 1.0) / energy - 1, rel=1e-6)


def test_headroom_is_no_bias() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(2))
    nearest, stochastic = fidelity(x, mxfp4()), fidelity(x, mxfp4("stochastic", 0.75))
    assert nearest.saturation > 0.0
    assert stochastic.saturation == 0.0  # which headroom is for
    assert abs(stochastic.bias or 1.0) < 1e-3 < abs(nearest.bias or 0.0)
    assert (nearest.snr or 0.0) > (stochastic.snr or 0.0) + 1.0


def test_non_finite_operands_have_no_ratio() -> None:
    x = torch.ones(1, 32)
    x[0, 5] = torch.nan
    found = fidelity(x, mxfp4())
    assert (found.snr, found.bias) == (None, None)
    assert math.isnan(found.amax)
    huge = QuantizationError.of([64, 64, 0, 0, 1e40, 1e36, 1e40, 1e20, 1, 1])
    assert huge.snr == pytest.approx(40.0)  # beyond fp32, but finite
    zeros = fidelity(torch.zeros(3, 32), mxfp4())
    assert zeros == errors(96, 0.0, None, None, 0.0, 0.0, 0.0, None, None)


@pytest.mark.parametrize("chunk", [1 << 20, 20_000])  # whole, and 78 rows at a time or a tile's 128, of 384
@pytest.mark.parametrize("recipe", each_kind(recipes()))
def test_operands_of_every_recipe_against_float64(recipe: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lowprec.kernels.operand_stats.reference._CHUNK", chunk)
    found = get_recipe(recipe)
    linear_gemms = LinearGemms(found, LinearId(3, "mlp.linear_fc1"), 7, AmaxHistory)
    rng_step = RngStep(5, 2)
    matrix = torch.randn(384, 256, generator=torch.Generator().manual_seed(3)) * 3
    for history, slot in linear_gemms.histories.values():
        history.update_amax(slot, matrix.abs().amax())
    for history, _ in linear_gemms.histories.values():
        history.update(lambda amax: amax)
    before = {name: history.newest.clone() for name, (history, _) in linear_gemms.histories.items()}
    for gemm, operand in DIMS:
        spec = getattr(getattr(found, gemm), operand)
        if spec is None:
            continue
        columnwise = SIDES[operand][1] == gemm
        natural = matrix.t() if columnwise else matrix
        backend = linear_gemms.backends.resolved.gemms[gemm]
        sums = backend.error_stats(gemm, operand, natural, rng_step)
        request = CastRequest(not columnwise, columnwise, update_amax=False)
        quantized, _ = backend.quantize(operand, natural, rng_step, request)
        data, scale = quantized.columnwise() if columnwise else quantized.rowwise()
        q = data.double()
        if scale is not None:
            rows, columns = block_sizes(spec, data)
            blocks = scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            q = q * (blocks if scale.numel() > 1 else scale.double())
        of_tensor = quantized.columnwise_tensor_scale if columnwise else quantized.rowwise_tensor_scale
        q = q * (1.0 if of_tensor is None else of_tensor.double()) / spec.headroom
        transform = linear_gemms.transforms.at(gemm, rng_step)
        of = matrix
        if spec.source == "fprop":
            of = backend._of_fprop(operand, natural, rng_step)
            of = of.t() if columnwise else of
        x, rounded = ((each if transform is None else transform.apply(each)).double() for each in (matrix, of))
        want = (x.numel(), (x != 0).sum(), ((x != 0) & (q == 0)).sum(), (x**2).sum(), ((q - x) ** 2).sum())
        got = (*sums[:3], *sums[4:6])
        assert [float(n) for n in got] == pytest.approx([float(n) for n in want], rel=1e-6)
        assert float(sums[6]) == pytest.approx(float((q * x).sum()), rel=1e-6)
        assert float(sums[7]) == float(x.abs().max())
        arguments = backend._arguments(gemm, operand, spec, rng_step) | {"group": transform and transform.block}
        made = quantize_by_reference(rounded.to(matrix.dtype), spec, **arguments)
        scales = as_numbers(made.scale, spec.scale_format)
        scales = scales if made.tensor_scale is None else scales * made.tensor_scale
        assert (float(sums[8]), 1 / float(sums[9])) == pytest.approx((float(scales.max()), float(scales.min())))
        assert 10 < (QuantizationError.of(sums.tolist()).snr or 0.0) < 60
    assert all(torch.equal(history.newest, before[name]) for name, (history, _) in linear_gemms.histories.items())


@pytest.mark.parametrize("output", ["fp32", "operand"])
def test_statistics_by_the_kernel_round_the_transform_as_the_operand_does(
    output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):  # noqa: N818
        pass

    class Kernel:
        @staticmethod
        def quantize_mx(rule: Any, **_: object) -> None:
            raise Asked(rule.rounds_transform)

    monkeypatch.setattr(dispatch, "has_mx_kernel", lambda _, rule: rule is not None)
    monkeypatch.setattr(cast_plan, "load", lambda _: Kernel)
    recipe = get_recipe("mxfp4_rht")
    assert recipe.wgrad.hadamard is not None
    hadamard = replace(recipe.wgrad.hadamard, signs="none", output=output)
    recipe = replace(recipe, wgrad=replace(recipe.wgrad, hadamard=hadamard))
    backend = LinearGemms(recipe, LinearId(1, "x"), 0, AmaxHistory).backends.built("emulated")
    with pytest.raises(Asked, match=str(output == "operand")):
        backend.error_stats("wgrad", "grad_output", torch.ones(64, 64).bfloat16(), RngStep(0, 0))
