"""Rows of bytes hold codes and scales without loss, for every format and scale that a token may travel in."""

from dataclasses import replace

import pytest
import torch

from megatron_lowprec.formats import ELEMENT_FORMATS
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.token_rows import pack_rows, split_rows, unpack_rows
from megatron_lowprec.recipe.fp8_dispatch import dispatched_bytes
from megatron_lowprec.recipe.registry import FP8_1X128, FP8_ROW, MXFP8
from megatron_lowprec.recipe.schema import QuantSpec

SPECS = [
    FP8_1X128,
    FP8_ROW,
    replace(FP8_1X128, scale_rule="amax_pow2"),
    *(replace(MXFP8, format=name) for name, fmt in ELEMENT_FORMATS.items() if fmt.bits <= 8),
]


def tokens() -> torch.Tensor:
    """bf16 [9, 256] with rows of zeros, of the largest and smallest magnitudes, and of NaN and Inf."""
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(1))
    x[1], x[2], x[3] = 0.0, x[2] * 1e38, x[3] * 1e-38
    x[4, 5], x[5, 200] = torch.nan, -torch.inf
    return x.bfloat16()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.format} {spec.granularity} {spec.scale_rule}")
def test_rows_hold_codes_and_scales(spec: QuantSpec) -> None:
    x = quantize(tokens(), spec)
    rows = pack_rows(x)
    assert rows.dtype == torch.uint8
    assert rows.shape == (9, dispatched_bytes(spec, 256))
    got = unpack_rows(rows, 256, spec, torch.bfloat16)
    assert got.shape == x.shape
    assert torch.equal(pack_rows(got), rows)
    # a NaN scale makes its block NaN, whatever the codes
    torch.testing.assert_close(got.dequantize(), x.dequantize(), rtol=0, atol=0, equal_nan=True)
    parts = [unpack_rows(part, 256, spec, torch.bfloat16) for part in rows.split([4, 0, 5])]
    for part, want in zip(split_rows(got, [4, 0, 5]), parts, strict=True):
        torch.testing.assert_close(part.dequantize(), want.dequantize(), rtol=0, atol=0, equal_nan=True)


def test_one_row_of_a_width_that_four_does_not_divide() -> None:
    """A rank may get a single token; its fp32 scales then begin at any byte."""
    x = quantize(tokens()[:1, :190], FP8_1X128)
    got = unpack_rows(pack_rows(x), 190, FP8_1X128, torch.bfloat16)
    assert torch.equal(got.dequantize(), x.dequantize())


def test_smallest_scale_that_is_a_power_of_two() -> None:
    """2^-127 is subnormal in fp32; 2^127 is the largest."""
    spec = replace(FP8_1X128, scale_rule="amax_pow2")
    scale = torch.tensor([[2.0**-127, 2.0**-126], [1.0, 2.0**127], [torch.nan, 2.0**-1]])
    x = QuantizedTensor(torch.Size((3, 256)), torch.bfloat16, spec, torch.zeros(3, 256).bfloat16(), scale).validate()
    rows = pack_rows(x)
    assert rows[:, 256:].tolist() == [[0, 1], [127, 254], [255, 126]]
    torch.testing.assert_close(
        unpack_rows(rows, 256, spec, torch.bfloat16).rowwise_scale, scale, rtol=0, atol=0, equal_nan=True
    )


def test_padded_rows_are_dropped() -> None:
    """1x128 blocks of a native GEMM are padded to whole blocks of rows."""
    x = quantize(tokens(), FP8_1X128)
    codes = x.rowwise_data
    assert codes is not None
    assert x.rowwise_scale is not None
    padded = replace(
        x,
        rowwise_data=torch.nn.functional.pad(codes, (0, 0, 0, 119)).to(torch.float8_e4m3fn),
        rowwise_scale=torch.nn.functional.pad(x.rowwise_scale, (0, 0, 0, 119)).t().contiguous().t(),
    )
    finite = [row for row in range(9) if row not in (4, 5)]
    assert torch.equal(pack_rows(padded)[finite], pack_rows(x)[finite])
