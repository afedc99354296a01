"""TransformerEngine's quantizers in plain torch against this project's, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.amax_history.reference import always_roll_history_
from megatron_lowprec.kernels.quantize.reference import e8m0_scale
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.quantizer import delayed_encode_scale, quantize
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.registry import FP8_CURRENT, FP8_CURRENT_E5M2, FP8_DELAYED, FP8_DELAYED_E5M2, MXFP4
from megatron_lowprec.recipe.schema import HadamardSpec, HistorySpec, QuantSpec
from megatron_lowprec.te import te_recipe
from megatron_lowprec.te.factory import quantizer_of
from tests.te.conftest import Import

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def tensors(generator: torch.Generator) -> list[torch.Tensor]:
    """Normal, wide, tiny and zero values; rows and columns are whole blocks."""
    normal = torch.randn(64, 128, generator=generator)
    wide = normal * torch.exp2(torch.randint(-20, 20, normal.shape, generator=generator))
    return [each.to(dtype) for dtype in (torch.float32, torch.bfloat16) for each in (normal, wide, 1e-6 * normal)] + [
        torch.zeros(32, 64)
    ]


@pytest.mark.parametrize("floor", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["amax", "amax_pow2"])
@pytest.mark.parametrize("spec", [FP8_CURRENT, FP8_CURRENT_E5M2], ids=["e4m3", "e5m2"])
def test_current_scaling(te: Import, generator: torch.Generator, spec: QuantSpec, rule: str, floor: float) -> None:
    """With the arguments that the translated quantizer has."""
    spec = replace(spec, scale_rule=rule, amax_floor=floor)
    native: Any = quantizer_of(spec)
    reference = te("pytorch.custom_recipes.reference_current_scaling").CurrentScalingQuantizerRef(
        TORCH[spec.format], pow_2_scales=native.force_pow_2_scales, eps=native.amax_epsilon
    )
    for x in tensors(generator):
        theirs, ours = reference.quantize(x), quantize(x, spec)
        assert torch.equal(theirs.data.view(torch.uint8), ours.codes)
        assert torch.equal(theirs.scale.reshape(-1), ours.scale.reshape(-1))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_mxfp8_scales(name: str) -> None:
    """Its kernels multiply the amax by an fp32 reciprocal and round up, for all amaxes of bf16 tensors the same byte.

    Source: ``common/CuTeDSL/cast/mxfp8/quantize_mxfp8.py``.
    """
    fmt = FORMATS[name]
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    product = amax * (1 / torch.tensor(fmt.max))
    exponent, mantissa = product.view(torch.int32) >> 23, product.view(torch.int32) & 0x7FFFFF
    rounds_up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    assert torch.equal(e8m0_scale(amax, fmt, "round_up").int().view(-1), exponent + rounds_up)


def test_mxfp4(te: Import, generator: torch.Generator) -> None:
    """Its reference has scales rounded up, in blocks of 1x32; no recipe class of it has MXFP4."""
    module = te("pytorch.custom_recipes.reference_nvfp4")
    spec = replace(MXFP4, scale_rule="round_up")
    for x in tensors(generator)[:-1]:  # a block of zeros has a scale of 0 there
        codes, scale = module.NVFP4QuantizerRef._quantize_blockwise_reference(
            x, torch.ones(1), 32, 1, pow_2_scales=True, eps=0.0
        )
        ours = quantize(x, spec)
        assert torch.equal(module.cast_from_fp4x2(codes, torch.float32), ours.elements.float())
        assert torch.equal(scale, torch.exp2(ours.scale.float() - 127))


@pytest.mark.parametrize("tile", ["1x16", "16x16"])
@pytest.mark.parametrize("rht", [False, True])
def test_nvfp4(te: Import, generator: torch.Generator, tile: str, rht: bool) -> None:
    """Both directions of its recipe's quantizers; bf16 entries are rounded after the transform."""
    module = te("pytorch.custom_recipes.reference_nvfp4")
    reference = module.NVFP4QuantizerRef(
        module.reference_utils.Fp4Formats.E2M1, quant_tile_shape=sizes(tile), with_rht=rht and tile == "1x16"
    )
    spec = QuantSpec("e2m1", tile, "e4m3", "product", tensor_scale=TensorScaleSpec(2688.0))
    transform = Transform(HadamardSpec(16, signs="nvfp4", output="operand"))
    for x in tensors(generator):
        theirs, turned = reference.quantize(x), x.t().contiguous()
        assert_same(theirs.data, theirs.scale, quantize(x, spec), module)
        turned = transform.apply(turned).to(x.dtype) if reference.with_rht else turned
        assert_same(theirs.data_t, theirs.scale_t, quantize(turned, spec), module)


@pytest.mark.parametrize("tile", ["1x16", "16x16"])
@pytest.mark.parametrize("measure", ["mse", "mae"])
@pytest.mark.parametrize("bound", [256, 448])
def test_four_over_six(te: Import, generator: torch.Generator, tile: str, measure: Any, bound: int) -> None:
    module = te("pytorch.custom_recipes.reference_nvfp4")
    reference = module.NVFP4QuantizerRef(
        module.reference_utils.Fp4Formats.E2M1,
        quant_tile_shape=sizes(tile),
        nvfp4_use_4over6=True,
        nvfp4_e4m3_max=bound,
        nvfp4_4over6_err_mode=measure,
    )
    scale = ScaleSpec(tile, "e4m3", "base", four_over_six=measure)
    spec = QuantSpec("e2m1", scale=scale, tensor_scale=TensorScaleSpec(6.0 * bound))
    for x in tensors(generator):
        theirs, ours, rows = reference.quantize(x), quantize(x, spec), sizes(tile)[0]
        found = [
            (module.cast_from_fp4x2(theirs.data, torch.float64), theirs.scale.double()),
            (ours.elements.double(), ours.scale.view(torch.float8_e4m3fn).repeat_interleave(rows, 0).double()),
        ]
        step, blocks = x.abs().amax().double() / (6 * bound), x.double().unflatten(1, (-1, 16))
        differences = [values.unflatten(1, (-1, 16)) * scale.unsqueeze(-1) * step - blocks for values, scale in found]
        errors = [
            each.unflatten(0, (-1, rows)).abs().pow(2 if measure == "mse" else 1).sum((1, 3)) for each in differences
        ]
        # sums of magnitudes are often equal, and then the order of fp32 operations decides
        torch.testing.assert_close(*errors, rtol=1e-6, atol=0)
        same = found[0][1] == found[1][1]
        assert same.float().mean() > 0.99
        assert torch.equal(*(values.unflatten(1, (-1, 16))[same] for values, _ in found))


def sizes(tile: str) -> tuple[int, ...]:
    return tuple(int(size) for size in tile.split("x"))


def assert_same(codes: torch.Tensor, scale: torch.Tensor, ours: QuantizedTensor, module: Any) -> None:
    """Equal values, whatever the sign of zero, and equal scales of blocks."""
    assert ours.spec is not None
    assert ours.spec.block is not None
    assert torch.equal(module.cast_from_fp4x2(codes, torch.float32), ours.elements.float())
    of_rows = ours.scale.repeat_interleave(ours.spec.block[0], 0)
    assert torch.equal(scale.view(torch.uint8), of_rows)


@pytest.mark.parametrize("rule", ["max", "most_recent"])
@pytest.mark.parametrize("spec", [FP8_DELAYED, FP8_DELAYED_E5M2], ids=["e4m3", "e5m2"])
def test_delayed_scaling(te: Import, generator: torch.Generator, spec: QuantSpec, rule: Any) -> None:
    """Windows and scales of some updates, by its update in Python; 0, Inf and NaN among the amaxes."""
    quantization = te("pytorch.quantization")
    recipe = te_recipe("fp8_delayed")
    recipe.amax_history_len, recipe.amax_compute_algo = 3, rule
    window, scale = torch.zeros(3, 1), torch.ones(1)
    history = AmaxHistory(HistorySpec(3, rule))
    history.add_tensor()
    values = [2.0, 0.0, 5.0, float("inf"), 1.0, 1.0, 1.0, 1.0, float("nan"), 1e-38, 1e-38, 1e-38, 1e-38]
    values += torch.rand(20, generator=generator).tolist()
    scales = []
    for amax in values:
        window[0] = amax
        history.newest[0] = amax
        quantization._amax_and_scale_update(window, scale, torch.finfo(TORCH[spec.format]).max, recipe)
        # in Python it shifts zeros as well
        always_roll_history_(history.newest, history.window, history.in_effect, rule == "max")
        ours = delayed_encode_scale(history.in_effect, replace(spec, history=3, history_rule=rule))
        torch.testing.assert_close(ours.reshape(-1), scale, rtol=2**-23, atol=0)
        scales.append(scale.item())
    assert len(set(scales)) > 3
