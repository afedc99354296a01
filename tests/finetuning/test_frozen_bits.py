"""Frozen weights as codes: passes have the bits of the layer that they replace."""

from dataclasses import replace

import pytest
import torch

from megatron_lowprec import GemmSpec, QuantSpec, Recipe, get_recipe
from megatron_lowprec.finetuning import FrozenLayer, quantize_frozen_weights
from megatron_lowprec.kernels.cast_fp8 import reference as cast_fp8
from megatron_lowprec.linear.backends.hopper_fp8.dense import rule_of
from megatron_lowprec.linear.lowprec_linear import LowPrecConv1D, LowPrecLinear
from megatron_lowprec.quantization.frozen_weight import Codes, FrozenWeight, stored_specs
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.recipe.registry import MXFP4, NVFP4
from tests.finetuning.frozen_layers import ENTRIES, IN, OUT, each_recipe, equal, held, layer_of, passes
from tests.linear.blackwell_cases import pretended
from tests.weekly import also_weekly


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@each_recipe
def test_passes_have_the_bits_of_the_weight(name: str, kind: str) -> None:
    """y, dx and db; under delayed scaling from the second step on, since the scale of the first is 1."""
    first = name == "fp8_delayed"
    want, layer = passes(layer_of(name, kind)), held(name, kind)
    assert isinstance(layer, FrozenLayer)
    assert isinstance(layer, LowPrecLinear if kind == "linear" else LowPrecConv1D)
    got = passes(layer)
    assert equal(got[first:], want[first:])
    assert not equal(got[1:], passes(layer_of("bf16", kind))[1:])


@pytest.mark.gpu
@each_recipe
def test_passes_on_a_gpu_have_the_bits_of_the_weight(name: str) -> None:
    """Native operands of FP8 recipes and Triton's casts of the others; codes are those of a CPU."""
    first = name == "fp8_delayed"
    want = passes(layer_of(name).cuda())
    layer, on_cpu = quantize_frozen_weights(layer_of(name).cuda()), held(name)
    assert equal(passes(layer)[first:], want[first:])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(layer.buffers(), on_cpu.buffers(), strict=True))


@pytest.mark.parametrize("name", also_weekly(["mxfp8", "mxfp8_2d", "nvfp4_all", "quartet2"], ["nvfp4_all"]))
def test_block_scaled_units_read_the_codes(name: str) -> None:
    """Codes and scales in the units' layout, by the model of the units that runs on a CPU."""
    with pretended():
        layer = held(name)
        assert equal(passes(layer), passes(layer_of(name)))
        gemms = layer.linear_gemms.backends.resolved.gemms
        assert {gemms[gemm].name for gemm in ("fprop", "dgrad")} == {"blackwell_mx"}


@pytest.mark.parametrize("of_fprop", [False, True])
def test_dgrad_of_fprop_s_codes_needs_one_direction(of_fprop: bool) -> None:
    """MXFP8 by rows: with ``source="fprop"`` dgrad quantizes the dequantized codes again, with and without codes."""
    mxfp8 = get_recipe("mxfp8")
    assert mxfp8.dgrad.weight is not None
    weight = replace(mxfp8.dgrad.weight, source="fprop" if of_fprop else "original")
    recipe = replace(mxfp8, dgrad=replace(mxfp8.dgrad, weight=weight))
    layer = held(recipe)
    assert equal(passes(layer), passes(layer_of(recipe)))
    assert sum(b.nbytes for b in layer.buffers()) == (ENTRIES + ENTRIES // 32) * (1 if of_fprop else 2)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4_rht_sr", "quartet2", "fp8_delayed"])
@pytest.mark.parametrize("storage", [MXFP4, NVFP4], ids=lambda spec: spec.granularity)
def test_stored_values_replace_the_weight(recipe: str, storage: QuantSpec) -> None:
    """With ``storage`` a layer has the bits of one whose weight has the values of the codes, under every recipe."""
    layer, rounded = held(recipe, storage=storage), layer_of(recipe)
    values = quantize(rounded.weight, storage).dequantize().bfloat16()
    rounded.weight.data.copy_(values)
    assert torch.equal(layer.weight.value(), values)
    assert equal(passes(layer), passes(rounded))
    scales = ENTRIES // 32 if storage is MXFP4 else ENTRIES // 16 + 4
    assert sum(buffer.nbytes for buffer in layer.buffers()) == ENTRIES // 2 + scales


@pytest.mark.parametrize("granularity", ["tensor", "row", "128x128"])
def test_operands_of_native_gemms_are_the_cast_s(granularity: str) -> None:
    spec = QuantSpec("e4m3", granularity=granularity)
    weight = layer_of("bf16").weight
    specs = stored_specs(Recipe("r", "", fprop=GemmSpec(spec, spec), dgrad=GemmSpec(None, spec, spec)))
    codes = [Codes.of(matrix, one) for matrix, one in zip((weight, weight.t()), specs[:2]) if one is not None]
    stored = [tensor for each in codes for tensor in each if tensor is not None]
    frozen = FrozenWeight(specs, stored, (OUT, IN), torch.bfloat16)
    want = cast_fp8.cast_fp8(weight, rule_of(spec), rowwise=True, columnwise=True)
    for columnwise in (False, True):
        found = frozen.quantized(columnwise=columnwise, codes=True)
        assert found is not None
        got = found.columnwise() if columnwise else found.rowwise()
        for a, b in zip(got, want[2:4] if columnwise else want[:2], strict=True):
            assert a is not None
            assert b is not None
            assert (a.dtype, a.is_contiguous()) == (b.dtype, True)
            assert torch.equal(a.float(), b.float())
