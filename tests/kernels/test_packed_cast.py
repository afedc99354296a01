"""Packed codes: every code, and the project's quantizer."""

import pytest
import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.packed_cast.reference import packed_cast, packed_decode
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.recipe.schema import QuantSpec
from tests.kernels.exact import exact_value
from tests.kernels.packed_cast_cases import PACKED, matrix

packed_formats = pytest.mark.parametrize("name", PACKED)
E5M6 = FORMATS["e5m6"]


def test_e5m6_is_the_upper_part_of_fp16() -> None:
    codes = torch.arange(1 << 12, dtype=torch.int32)
    upper = (codes << 4).to(torch.uint16).view(torch.float16).double()
    values = torch.tensor([float(exact_value(code, E5M6)) for code in range(1 << 12)], dtype=torch.float64)
    assert torch.equal(upper.isnan(), values.isnan())
    assert torch.equal(upper.nan_to_num(0.0), values.nan_to_num(0.0))


@packed_formats
def test_every_finite_code_is_packed_and_decoded(name: str) -> None:
    fmt = FORMATS[name]
    values = [float(exact_value(code, fmt)) for code in range(1 << fmt.bits)]
    finite = torch.tensor([value for value in values if abs(value) < torch.inf])
    x = torch.zeros(-(-finite.numel() // 64), 128)

    rows = torch.nn.functional.pad(finite, (0, x.shape[0] * 64 - finite.numel())).view(-1, 64)
    x[:, :64] = rows
    x[:, 64] = fmt.max  # the scale 1 in every block
    packed = packed_cast(x, fmt)
    assert torch.equal(packed.scale, torch.full((x.shape[0], 1), 127, dtype=torch.uint8))
    decoded = packed_decode(*packed, fmt, torch.bfloat16)
    assert torch.equal(decoded.float(), x)
    assert torch.equal(decoded.signbit(), x.signbit())


def test_blocks_of_the_check_of_sizes_are_the_kernels() -> None:
    from megatron_lowprec.kernels.packed_cast.reference import BLOCK
    from megatron_lowprec.recipe.coverage import ACTIVATION_BLOCK

    assert ACTIVATION_BLOCK == BLOCK  # recipe/ imports no kernels


def test_two_codes_are_three_bytes() -> None:
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1], x[0, 2] = E5M6.max, -1.0, 2.0**-20  # codes 0x7BF, 0xBC0, 0x001
    codes, scale = packed_cast(x, E5M6)
    assert codes.shape == (1, 192)
    assert codes[0, :6].tolist() == [0xBF, 0x07, 0xBC, 0x01, 0x00, 0x00]
    assert scale.tolist() == [[127]]


@packed_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_the_quantizers(name: str, dtype: torch.dtype) -> None:
    x, fmt = matrix(37, 384, dtype), FORMATS[name]
    spec = QuantSpec(name, granularity="1x128", scale_format="e8m0", scale_rule="round_up")
    want = quantize(x, spec).dequantize(dtype)
    got = packed_decode(*packed_cast(x, fmt), fmt, dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@packed_formats
def test_relative_error_is_half_a_step_above_the_least_normal(name: str) -> None:
    x, fmt = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)), FORMATS[name]
    error = (packed_decode(*packed_cast(x, fmt), fmt, torch.float32) - x).abs()
    normal = x.abs() > x.abs().amax() * 2.0 ** (fmt.min_exponent - fmt.max_exponent)
    assert bool((error <= x.abs() * 2.0 ** -(fmt.mantissa_bits + 1))[normal].all())


@packed_formats
def test_an_empty_matrix_has_no_codes(name: str) -> None:
    packed = packed_cast(torch.zeros(0, 256), FORMATS[name])
    assert packed_decode(*packed, FORMATS[name], torch.bfloat16).shape == (0, 256)
