"""Packed codes of a matrix in one pass, and their values in one; bits equal to ``reference.py``.

A program has whole blocks of a few rows. Bytes an entry with bf16 and E5M6: 3.5 either way.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.amax.triton_ops import amax_along
from megatron_lowprec.kernels.packed_cast.reference import BLOCK, SCALE_RULE, Packed
from megatron_lowprec.kernels.quantize.rule import MxConstants, MxRule
from megatron_lowprec.kernels.quantize.triton_ops import (
    NEAREST_EVEN,
    e8m0,
    element_codes,
    power_of_two,
    round_to_grid,
)

_ROWS, _WARPS = 16, 4


@triton.jit
def _packed_cast_kernel(x_ptr, codes_ptr, scale_ptr, R, K, MX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    block = tl.program_id(1)
    inside = row < R
    first = row * K + block * COLUMNS
    x = tl.load(x_ptr + first + tl.arange(0, COLUMNS)[None, :], mask=inside, other=0.0).to(tl.float32)
    byte = e8m0(amax_along(tl.abs(x), 1), MX)
    tl.store(scale_ptr + row * (K // COLUMNS) + block, byte, mask=inside)
    # 2^(127 - byte) is the byte 254 - byte; 255 stays NaN
    encode = power_of_two(tl.where(byte == 255, 255, 254 - byte))
    elements = round_to_grid(
        x * encode, tl.zeros([1, 1], tl.uint32), 0, MX.MANTISSA, MX.MIN_EXPONENT, MX.MAX, NEAREST_EVEN, 16, True
    )
    codes = element_codes(elements, MX.MANTISSA, MX.MIN_EXPONENT, MX.CODE_BITS, MX.NAN_CODE, byte == 255)
    if MX.CODE_BITS == 12:
        low, high = tl.split(tl.reshape(codes, [ROWS, COLUMNS // 2, 2]))
        at = codes_ptr + first // 2 * 3 + 3 * tl.arange(0, COLUMNS // 2)[None, :]
        tl.store(at, low & 0xFF, mask=inside)
        tl.store(at + 1, (low >> 8) | ((high & 0xF) << 4), mask=inside)
        tl.store(at + 2, high >> 4, mask=inside)
    else:
        tl.store(codes_ptr + first + tl.arange(0, COLUMNS)[None, :], codes, mask=inside)


@triton.jit
def _values(code, scale, MX: tl.constexpr):
    """Finite codes, int32, times their blocks' scales."""
    magnitude = code & ((1 << (MX.CODE_BITS - 1)) - 1)
    # fp32 with the format's exponent field, subnormal numbers included, has the value up to a power of two
    value = (magnitude << (23 - MX.MANTISSA)).to(tl.float32, bitcast=True) * 2.0 ** (126 + MX.MIN_EXPONENT)
    sign = (code >> (MX.CODE_BITS - 1)) << 31
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) * scale


@triton.jit
def _packed_decode_kernel(
    codes_ptr, scale_ptr, out_ptr, R, K, MX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    block = tl.program_id(1)
    inside = row < R
    first = row * K + block * COLUMNS
    # a NaN code's block has the scale NaN
    scale = power_of_two(tl.load(scale_ptr + row * (K // COLUMNS) + block, mask=inside, other=0).to(tl.int32))
    if MX.CODE_BITS == 12:
        at = codes_ptr + first // 2 * 3 + 3 * tl.arange(0, COLUMNS // 2)[None, :]
        start = tl.load(at, mask=inside, other=0).to(tl.int32)
        middle = tl.load(at + 1, mask=inside, other=0).to(tl.int32)
        last = tl.load(at + 2, mask=inside, other=0).to(tl.int32)
        codes = tl.reshape(tl.join(start | ((middle & 0xF) << 8), (middle >> 4) | (last << 4)), [ROWS, COLUMNS])
    else:
        codes = tl.load(codes_ptr + first + tl.arange(0, COLUMNS)[None, :], mask=inside, other=0).to(tl.int32)
    values = _values(codes, scale, MX).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + first + tl.arange(0, COLUMNS)[None, :], values, mask=inside)


@lru_cache(maxsize=8)
def _constants(fmt: Format) -> MxConstants:
    return MxRule(fmt, SCALE_RULE).constants(0, rows=True, columns=False, packed=False, codes=True, converts=False)


def packed_cast(x: torch.Tensor, fmt: Format) -> Packed:
    """As ``reference.packed_cast``; bf16 or fp32."""
    R, K = x.shape
    codes = torch.empty((R, K * fmt.bits // 8), dtype=torch.uint8, device=x.device)
    scale = torch.empty((R, K // BLOCK), dtype=torch.uint8, device=x.device)
    constants = {"MX": _constants(fmt), "ROWS": _ROWS, "COLUMNS": BLOCK}
    # a contracted multiply-add rounds once, the reference twice
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    _packed_cast_kernel[triton.cdiv(R, _ROWS), K // BLOCK](x, codes, scale, R, K, **constants, **options)
    return Packed(codes, scale)


def packed_decode(codes: torch.Tensor, scale: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """As ``reference.packed_decode``."""
    R, K = codes.shape[0], scale.shape[1] * BLOCK
    out = torch.empty((R, K), dtype=dtype, device=codes.device)
    constants = {"MX": _constants(fmt), "ROWS": _ROWS, "COLUMNS": BLOCK}
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    _packed_decode_kernel[triton.cdiv(R, _ROWS), K // BLOCK](codes, scale, out, R, K, **constants, **options)
    return out
