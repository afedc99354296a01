"""Gradients as FP8 codes in few launches: two a cast, and one a buffer for scales, requantizing and summing.

A cast of n entries reads 8n bytes and writes n; its second launch finds the scale from the first one's partial amaxes,
so the host neither waits nor launches for it. Counting reads a byte an entry; a sum reads one of each rank and writes
four. Bounds are a table in device memory, copied once: unlike addresses they never change. The grid is (part, tensor),
as in ``multi_tensor_cast``.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger
from megatron_lowprec.kernels.cast_fp8.prologue import KINDS
from megatron_lowprec.kernels.cast_fp8.rule import CodeConstants, Fp8Rule, code_constants
from megatron_lowprec.kernels.cast_fp8.triton_ops import encode_scale, from_fp8, round_to_fp8, to_fp8
from megatron_lowprec.kernels.gradient_codes.reference import Bounds, largest_code
from megatron_lowprec.kernels.launch import Specialized, specialized_on
from megatron_lowprec.kernels.multi_tensor_cast.triton import address_table

_BLOCK, _MOST_PARTS = 4096, 256
_SCALES = 128  # of a program
_ALIGNMENT = 16  # of addresses in bytes, and of bounds, for vector loads and stores
_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _gradient_amax_kernel(values_ptr, partial_ptr, count, BLOCK: tl.constexpr):
    found = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = block + tl.arange(0, BLOCK)
        found = larger(found, tl.abs(tl.load(values_ptr + at, mask=at < count, other=0.0)))
    tl.store(partial_ptr + tl.program_id(0) + tl.arange(0, 1), amax_along(found, 0))


@triton.jit
def _gradient_scale(amax, mu_ptr, CAST: tl.constexpr):
    scale = encode_scale(amax, CAST) * tl.load(mu_ptr)
    return tl.where(scale > _FP32_MAX, _FP32_MAX, scale)  # which keeps NaN


@triton.jit
def _gradient_scale_kernel(amax_ptr, mu_ptr, scale_ptr, count, CAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < count, other=0.0)
    tl.store(scale_ptr + at, _gradient_scale(amax, mu_ptr, CAST), mask=at < count)


@triton.jit
def _gradient_cast_kernel(
    values_ptr,
    codes_ptr,
    amax_ptr,
    mu_ptr,
    partial_ptr,
    count,
    CAST: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.arange(0, PARTS)
    amax = amax_along(tl.load(partial_ptr + part, mask=part < tl.num_programs(0), other=0.0), 0)
    if tl.program_id(0) == 0:
        tl.store(amax_ptr + tl.arange(0, 1), amax)
    scale = _gradient_scale(amax, mu_ptr, CAST)
    CODES: tl.constexpr = CAST.CODES
    for block in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = block + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + at, mask=at < count, other=0.0)
        tl.store(codes_ptr + at, to_fp8(value * scale, CODES), mask=at < count)


@triton.jit
def _gradient_count_kernel(codes_ptr, partial_ptr, count, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    found = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = block + tl.arange(0, BLOCK)
        codes = tl.load(codes_ptr + at, mask=at < count, other=0)
        found += ((codes & 0x7F) == LARGEST).to(tl.int32)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(found, 0))


@triton.jit
def _requantize_kernel(
    codes_ptr, table_ptr, ratio_ptr, CODES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    start, end = _bounds(table_ptr, ALIGNED)
    ratio = tl.load(ratio_ptr + tl.program_id(1))
    for block in range(start + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        at = block + tl.arange(0, BLOCK)
        value = from_fp8(tl.load(codes_ptr + at, mask=at < end, other=0), CODES.MANTISSA, CODES.MIN_EXPONENT)
        tl.store(codes_ptr + at, to_fp8(value * ratio, CODES), mask=at < end)


@triton.jit
def _gradient_sum_kernel(
    received_ptr,
    total_ptr,
    table_ptr,
    factor_ptr,
    stride,
    RANKS: tl.constexpr,
    ROUNDS: tl.constexpr,
    CODES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, end = _bounds(table_ptr, ALIGNED)
    factor = tl.load(factor_ptr + tl.program_id(1))
    for block in range(start + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        at = block + tl.arange(0, BLOCK)
        total = from_fp8(tl.load(received_ptr + at, mask=at < end, other=0), CODES.MANTISSA, CODES.MIN_EXPONENT)
        for rank in range(1, RANKS):
            codes = tl.load(received_ptr + tl.cast(rank, tl.int64) * stride + at, mask=at < end, other=0)
            total += from_fp8(codes, CODES.MANTISSA, CODES.MIN_EXPONENT)
            if ROUNDS:
                total = round_to_fp8(total, CODES)
        tl.store(total_ptr + at, total * factor, mask=at < end)


@triton.jit
def _bounds(table_ptr, ALIGNED: tl.constexpr):
    """Start and end of the program's tensor, int64."""
    start = tl.load(table_ptr + 2 * tl.program_id(1))
    end = tl.load(table_ptr + 2 * tl.program_id(1) + 1)
    if ALIGNED:
        start, end = tl.multiple_of(start, 16), tl.multiple_of(end, 16)
    return start, end


@lru_cache(maxsize=8)
def _launchers(fmt: Format, device: torch.device) -> tuple[Specialized, Specialized, Specialized]:
    """Kernels of scales, of a tensor's amax, and of its cast, tensor-wise by a power-of-two scale."""
    rule = Fp8Rule(fmt, "tensor", "amax_pow2")
    constants = rule.constants(True, False, False, False, KINDS["matrix"], (0, 0), device)
    cast = {"CAST": constants, "PARTS": _MOST_PARTS, "BLOCK": _BLOCK}
    return (
        Specialized(_gradient_scale_kernel, {"CAST": constants, "BLOCK": _SCALES}),
        Specialized(_gradient_amax_kernel, {"BLOCK": _BLOCK}, num_warps=8),
        Specialized(_gradient_cast_kernel, cast, num_warps=8),
    )


def _parts(entries: int) -> int:
    return min(_MOST_PARTS, triton.cdiv(entries, _BLOCK))


def gradient_scale(amax: torch.Tensor, fmt: Format, mu: torch.Tensor) -> torch.Tensor:
    """As ``reference.gradient_scale``, bit for bit."""
    amax = amax.contiguous()
    scale, count = torch.empty_like(amax), amax.numel()
    arguments = amax, mu, scale, count
    scales, _, _ = _launchers(fmt, amax.device)
    scales.launch(triton.cdiv(count, _SCALES), amax.device, arguments, specialized_on(arguments))
    return scale


def cast_gradient_(
    values: torch.Tensor, codes: torch.Tensor, amax: torch.Tensor, mu: torch.Tensor, fmt: Format
) -> None:
    """As ``reference.cast_gradient_``, bit for bit, except that a NaN's code is positive."""
    count, parts = values.numel(), _parts(values.numel())
    assert values.is_contiguous()
    partial = torch.empty(parts, device=values.device)
    _, amax_of, cast = _launchers(fmt, values.device)
    for kernel, arguments in ((amax_of, (values, partial, count)), (cast, (values, codes, amax, mu, partial, count))):
        kernel.launch(parts, values.device, arguments, specialized_on(arguments))


def count_saturated(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """As ``reference.count_saturated``."""
    partial = torch.empty(_parts(codes.numel()), dtype=torch.int32, device=codes.device)
    constants = {"LARGEST": largest_code(fmt), "BLOCK": _BLOCK}
    _gradient_count_kernel[partial.numel(),](codes, partial, codes.numel(), **constants, num_warps=8)
    return partial.sum()


def requantize_(codes: torch.Tensor, tensors: Sequence[Bounds], ratio: torch.Tensor, fmt: Format) -> None:
    """As ``reference.requantize_``, bit for bit, except that a NaN's code is positive."""
    grid, table, options = _launch(tensors, fmt, codes)
    if grid[0]:
        _requantize_kernel[grid](codes, table, ratio.contiguous(), **options)


def sum_codes_(
    received: torch.Tensor,
    tensors: Sequence[Bounds],
    factor: torch.Tensor,
    fmt: Format,
    rounds: bool,
    total: torch.Tensor,
) -> None:
    """As ``reference.sum_codes_``, bit for bit."""
    ranks, stride = received.shape[0], received.stride(0)
    assert received.stride(1) == total.stride(0) == 1
    grid, table, options = _launch(tensors, fmt, received, total)
    if grid[0]:
        _gradient_sum_kernel[grid](
            received, total, table, factor.contiguous(), stride, RANKS=ranks, ROUNDS=rounds, **options
        )


def _launch(
    tensors: Sequence[Bounds], fmt: Format, *buffers: torch.Tensor
) -> tuple[tuple[int, int], torch.Tensor, dict[str, CodeConstants | bool | int]]:
    """Grid, table of bounds and common options of a launch over the tensors of flat buffers."""
    device = buffers[0].device
    strides = [buffer.stride(0) for buffer in buffers if buffer.dim() > 1]
    numbers = [*strides, *(number for bounds in tensors for number in bounds)]
    grid = _parts(max((end - start for start, end in tensors), default=0)), len(tensors)
    table = address_table(tuple(tensors), device)
    aligned = all(number % _ALIGNMENT == 0 for number in (*numbers, *(buffer.data_ptr() for buffer in buffers)))
    return grid, table, {"CODES": code_constants(fmt, device), "ALIGNED": aligned, "BLOCK": _BLOCK, "num_warps": 8}
