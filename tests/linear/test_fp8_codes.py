"""Operands from FP8 codes have the bits of those quantized from the tensor, by either backend."""

from dataclasses import replace

import pytest
import torch

from megatron_lowprec import QuantSpec, Recipe, get_recipe
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8 import reference
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor

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
    gemms = LinearGemms(recipe_of(**fields), LinearId(1, "x"), 0, AmaxHistory).emulated
    history, slot = gemms._amax.histories["input"]
    history.in_effect[slot] = 3.0
    x = matrix(dtype)
    codes, _ = gemms.quantize("input", x, STEP, rowwise=True, columnwise=False, codes=True)
    recorded = history.newest[slot].clone()
    assert recorded == torch.inf
    assert codes.rowwise()[0].element_size() == 1
    for columnwise in (False, True):
        want, _ = gemms.quantize("input", x, STEP, rowwise=not columnwise, columnwise=columnwise)
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
    codes = QuantizedTensor(shape, torch.bfloat16, spec, cast.rowwise_data, cast.rowwise_scale)
    native = LinearGemms(recipe_of(), LinearId(1, "x"), 0, AmaxHistory).native
    for columnwise, data in ((False, cast.rowwise_data), (True, cast.columnwise_data)):
        got, scale = native.from_codes(codes, columnwise=columnwise)
        assert data is not None
        assert got.dtype == data.dtype
        assert_same_numbers(got.float(), data.float())
        assert scale is cast.rowwise_scale
