"""Operands from FP8 codes have the bits of those quantized from the tensor, by either backend."""

from dataclasses import replace

import pytest
import torch

from megatron_lowprec import QuantSpec, Recipe, get_recipe
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8 import reference
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.token_rows import pack_rows, unpack_rows
from megatron_lowprec.recipe.registry import FP8_1X128, FP8_ROW, MXFP4, MXFP8

TOKENS, FEATURES, STEP = 24, 48, RngStep(0, 0)


def recipe_of(**fields: object) -> Recipe:
    """fp8_delayed with these fields of the input in both GEMMs."""
    recipe = get_recipe("fp8_delayed")
    assert recipe.fprop.input is not None
    spec = replace(recipe.fprop.input, **fields)  # type: ignore[arg-type]
    return replace(recipe, fprop=replace(recipe.fprop, input=spec), wgrad=replace(recipe.wgrad, input=spec))


def matrix(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values over many binades, some beyond the scale of an amax of 3, and special ones."""
    x = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(0))
    x *= 2.0 ** torch.randint(-16, 4, x.shape, generator=torch.Generator().manual_seed(1))
    x[0, :6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-30])
    return x.to(dtype)


def assert_same_numbers(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, but for the sign of NaN, which torch's own ops do not keep."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"format": "e5m2"},
        {"scale_rule": "amax_pow2"},
        {"rounding": "half_away", "headroom": 0.75},
        {"margin": 2, "amax_floor": 1e-12},
    ],
    ids=str,
)
def test_emulated_operands(fields: dict[str, object], dtype: torch.dtype) -> None:
    gemms = LinearGemms(recipe_of(**fields), LinearId(1, "x"), 0, AmaxHistory).backends.built("emulated")
    history, slot = gemms._amax.histories["input"]
    history.in_effect[slot] = 3.0
    x = matrix(dtype)
    codes, _ = gemms.quantize("input", x, STEP, CastRequest(True, False, codes=True))
    recorded = history.newest[slot].clone()
    assert recorded == torch.inf
    assert codes.rowwise()[0].element_size() == 1
    for columnwise in (False, True):
        want, _ = gemms.quantize("input", x, STEP, CastRequest(not columnwise, columnwise))
        data, scale = want.columnwise() if columnwise else want.rowwise()
        got, got_scale = gemms.from_codes(codes, columnwise=columnwise)
        assert_same_numbers(got, data)
        assert (got.dtype, got.stride()) == (data.dtype, data.stride())
        assert (scale is None) == (got_scale is None) == (fields.get("scale_rule") == "amax_pow2")
        assert scale is None or got_scale is None or torch.equal(got_scale, scale)
    assert history.newest[slot] == recorded


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("tokens", [32, 24, 1])
def test_native_operands_are_padded_as_the_cast_pads_them(tokens: int, name: str) -> None:
    spec: QuantSpec = replace(recipe_of().fprop.input, format=name)  # type: ignore[type-var]
    cast = reference.cast_fp8(
        matrix()[torch.arange(tokens) % TOKENS],
        Fp8Rule(FORMATS[name], "tensor"),
        rowwise=True,
        columnwise=True,
        amax=torch.full((1,), 3.0),
    )
    shape = torch.Size((tokens, FEATURES))
    codes = QuantizedTensor(shape, torch.bfloat16, spec, cast.rowwise_data, cast.rowwise_scale).validate()
    native = LinearGemms(recipe_of(), LinearId(1, "x"), 0, AmaxHistory).backends.built("hopper_fp8")
    for columnwise, data in ((False, cast.rowwise_data), (True, cast.columnwise_data)):
        got, scale = native.from_codes(codes, columnwise=columnwise)
        assert data is not None
        assert got.dtype == data.dtype
        assert_same_numbers(got.float(), data.float())
        assert scale is cast.rowwise_scale


def tokens_of(rows: int = TOKENS) -> torch.Tensor:
    """``matrix`` with 256 features."""
    return matrix().repeat(1, 6)[torch.arange(rows) % TOKENS, :256].contiguous()


@pytest.mark.parametrize(
    "spec",
    [
        FP8_1X128,
        replace(FP8_1X128, scale_rule="amax_pow2"),
        FP8_ROW,
        MXFP8,
        replace(MXFP8, format="e3m2", scale_rule="even"),
        replace(MXFP4, headroom=0.75),
    ],
    ids=lambda spec: f"{spec.format} {spec.granularity} {spec.scale_rule}",
)
def test_emulated_operands_of_tokens(spec: QuantSpec) -> None:
    """With scales along features, a token's codes as bytes give the operand of fprop."""
    recipe = get_recipe("fp8_blockwise")
    recipe = replace(recipe, fprop=replace(recipe.fprop, input=spec))
    gemms = LinearGemms(recipe, LinearId(1, "x"), 0, AmaxHistory)
    x, w = tokens_of(), torch.zeros(128, 256, dtype=torch.bfloat16)
    emulated = gemms.backends.built("emulated")
    want, _ = emulated.quantize("input", x, STEP, CastRequest(True, False))
    codes = unpack_rows(pack_rows(gemms.quantize_tokens("input", x, w, STEP)), 256, spec, x.dtype)
    got, scale = emulated.from_codes(codes, columnwise=False)
    data, want_scale = want.rowwise()
    assert_same_numbers(got, data)
    assert (scale is None) == (want_scale is None) == spec.power_of_two_scale
    assert scale is None or want_scale is None or torch.equal(scale.isnan(), want_scale.isnan())
    none = unpack_rows(pack_rows(codes)[:0], 256, spec, x.dtype)
    assert emulated.from_codes(none, columnwise=False)[1] is None


@pytest.mark.parametrize("tokens", [128, 24])
@pytest.mark.parametrize("spec", [FP8_1X128, FP8_ROW], ids=lambda spec: spec.granularity)
def test_native_operands_of_tokens(spec: QuantSpec, tokens: int) -> None:
    """Codes and scales have the values and strides of the cast's; scales of padded rows are those of no token."""
    recipe, x = get_recipe("fp8_blockwise"), tokens_of(tokens)
    recipe = replace(recipe, fprop=replace(recipe.fprop, input=spec))
    rule = Fp8Rule(FORMATS[spec.format], spec.granularity, spec.scale_rule, spec.amax_floor)
    cast = reference.cast_fp8(x, rule, rowwise=True, columnwise=False)
    sent = QuantizedTensor(x.shape, x.dtype, spec, cast.rowwise_data, cast.rowwise_scale).validate()
    codes = unpack_rows(pack_rows(sent), 256, spec, x.dtype)
    data, scale = (
        LinearGemms(recipe, LinearId(1, "x"), 0, AmaxHistory)
        .backends.built("hopper_fp8")
        .from_codes(codes, columnwise=False)
    )
    assert cast.rowwise_data is not None
    assert cast.rowwise_scale is not None
    assert scale is not None
    assert (data.dtype, data.shape, data.stride()) == (torch.float8_e4m3fn, cast.rowwise_data.shape, (256, 1))
    assert torch.equal(data.view(torch.uint8), cast.rowwise_data.view(torch.uint8))
    assert scale.stride() == cast.rowwise_scale.stride()
    torch.testing.assert_close(scale[:tokens], cast.rowwise_scale[:tokens], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("spec", [FP8_1X128, FP8_ROW], ids=lambda spec: spec.granularity)
def test_native_scales_of_an_expert_in_the_middle_are_aligned(spec: QuantSpec) -> None:
    """cuBLAS refuses scales that do not begin at a multiple of 16 bytes."""
    recipe = get_recipe("fp8_blockwise")
    recipe = replace(recipe, fprop=replace(recipe.fprop, input=spec))
    scale = torch.rand(131, 1)[3:]
    assert scale.data_ptr() % 16
    sent = QuantizedTensor(
        torch.Size((128, 128)), torch.bfloat16, spec, torch.zeros(128, 128).to(torch.float8_e4m3fn), scale
    )
    _, found = (
        LinearGemms(recipe, LinearId(1, "x"), 0, AmaxHistory)
        .backends.built("hopper_fp8")
        .from_codes(sent, columnwise=False)
    )
    assert found is not None
    assert found.data_ptr() % 16 == 0
    assert torch.equal(found, scale)
