"""One launch for all FP8 products of a group; equal to ``reference.py`` but for the sums over 128 of tensor cores."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.grouped_cast_fp8.reference import BLOCK
from megatron_lowprec.kernels.grouped_quantize.triton import constants_of_groups, group_of
from megatron_lowprec.kernels.launch import launch
from megatron_lowprec.kernels.matrices import addresses_of, units_of

_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    DTYPES["e4m3"]: tl.float8e4nv,
    DTYPES["e5m2"]: tl.float8e5,
}
_BLOCK = tl.constexpr(BLOCK)
_WARPS, _STAGES = 8, 3  # not tuned

_NUMBERS = {"tensor": 0, "row": 1, "1x128": 2}
# named values of SCALES
ROW, BLOCKS = tl.constexpr(_NUMBERS["row"]), tl.constexpr(_NUMBERS["1x128"])


@triton.jit
def _pad_groups_kernel(x_ptr, out_ptr, table_ptr, N, GROUPS: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr):
    """Copies blocks of rows. Table, int64 [4, GROUPS]: rows, first padded row, first row, first block."""
    block = tl.program_id(0)
    matrix = group_of(table_ptr + 3 * GROUPS, block, GROUPS, PADDED)
    inside = (block - tl.load(table_ptr + 3 * GROUPS + matrix)) * _BLOCK + tl.arange(0, _BLOCK)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    source = (tl.load(table_ptr + 2 * GROUPS + matrix) + inside)[:, None] * N + n[None, :]
    target = (tl.load(table_ptr + GROUPS + matrix) + inside)[:, None] * N + n[None, :]
    mask = (n < N)[None, :]
    x = tl.load(x_ptr + source, mask=mask & (inside < tl.load(table_ptr + matrix))[:, None], other=0.0)
    tl.store(out_ptr + target, x, mask=mask)


@triton.jit
def _grouped_fp8_gemm_kernel(
    a_ptr,
    a_scale_ptr,
    b_scale_ptr,
    out_ptr,
    table_ptr,
    N,
    K,
    a_scale_m,
    a_scale_k,
    b_n,
    b_scale_group,
    b_scale_n,
    ELEMENT: tl.constexpr,
    SCALES: tl.constexpr,
    FAST: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Tiles and steps of one block. Table as in ``_pad_groups_kernel``, and a fifth row: address of b."""
    tiles_n = tl.cdiv(N, _BLOCK)
    row_tile = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n
    matrix = group_of(table_ptr + 3 * GROUPS, row_tile, GROUPS, PADDED)
    first_own = (row_tile - tl.load(table_ptr + 3 * GROUPS + matrix)) * _BLOCK
    first_m = tl.load(table_ptr + GROUPS + matrix) + first_own
    at = tl.arange(0, _BLOCK)
    m, first_n = first_m + at, tile_n * _BLOCK
    in_n = first_n + at < N
    group = matrix.to(tl.int64)
    # 64-bit addresses of tiles, 32-bit offsets inside
    a_tile = a_ptr + first_m * K
    b_ptr = tl.multiple_of(tl.load(table_ptr + 4 * GROUPS + matrix).to(tl.pointer_type(ELEMENT)), 16)
    b_tile = b_ptr + first_n.to(tl.int64) * b_n
    a_offsets = at[:, None] * K + at[None, :]
    b_offsets = at[None, :] * b_n + at[:, None]
    b_scales = b_scale_ptr + group * b_scale_group + tile_n * b_scale_n
    total = tl.zeros([_BLOCK, _BLOCK], tl.float32)
    for block in range(tl.cdiv(K, _BLOCK)):
        in_k = block * _BLOCK + at < K
        a = tl.load(a_tile + a_offsets, mask=in_k[None, :], other=0.0)
        b = tl.load(b_tile + b_offsets, mask=in_n[None, :] & in_k[:, None], other=0.0)
        if SCALES == BLOCKS:
            a_scale = tl.load(a_scale_ptr + m * a_scale_m + block * a_scale_k)
            total += tl.dot(a, b) * a_scale[:, None] * tl.load(b_scales + block)
        elif FAST:
            total = tl.dot(a, b, total)
        else:
            total += tl.dot(a, b)
        a_tile += _BLOCK
        b_tile += _BLOCK
    if SCALES == ROW:
        b_scale = tl.load(b_scale_ptr + group * N + first_n + at, mask=in_n, other=0.0)
        total = total * tl.load(a_scale_ptr + m)[:, None] * b_scale[None, :]
    elif SCALES != BLOCKS:
        total = total * tl.load(a_scale_ptr + matrix) * tl.load(b_scale_ptr + matrix)
    out_tile = out_ptr + (tl.load(table_ptr + 2 * GROUPS + matrix) + first_own) * N + first_n
    mask = (first_own + at < tl.load(table_ptr + matrix))[:, None] & in_n[None, :]
    tl.store(out_tile + at[:, None] * N + at[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_fp8_wgrad_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    table_ptr,
    M,
    N,
    tokens,
    a_scale_m,
    a_scale_k,
    b_scale_n,
    b_scale_k,
    TOTAL: tl.constexpr,
    ADDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALES: tl.constexpr,
    FAST: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Table, int64 [4, GROUPS]: address of the total, blocks of rows, first block, whether it is overwritten.

    ADDS: some total is not overwritten. ALIGNED: all of them begin at multiples of 16 bytes.
    """
    tiles_n = tl.cdiv(N, _BLOCK)
    tiles = tl.cdiv(M, _BLOCK) * tiles_n
    matrix = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    total_ptr = tl.load(table_ptr + matrix).to(tl.pointer_type(TOTAL))
    if ALIGNED:
        total_ptr = tl.multiple_of(total_ptr, 16)
    blocks = tl.load(table_ptr + GROUPS + matrix).to(tl.int32)
    first_block = tl.load(table_ptr + 2 * GROUPS + matrix)
    first_m, first_n = (tile // tiles_n) * _BLOCK, (tile % tiles_n) * _BLOCK
    at = tl.arange(0, _BLOCK)
    m, n = (first_m + at).to(tl.int64), (first_n + at).to(tl.int64)
    in_m, in_n = m < M, n < N
    # 64-bit addresses of tiles and of their rows, 32-bit offsets inside
    a_rows = a_ptr + m * tokens + first_block * _BLOCK
    b_rows = b_ptr + n * tokens + first_block * _BLOCK
    product = tl.zeros([_BLOCK, _BLOCK], tl.float32)
    for step in range(blocks):
        a = tl.load(a_rows[:, None] + at[None, :], mask=in_m[:, None], other=0.0)
        b = tl.load(b_rows[None, :] + at[:, None], mask=in_n[None, :], other=0.0)
        if SCALES == BLOCKS:
            block = first_block + step
            a_scale = tl.load(a_scale_ptr + m * a_scale_m + block * a_scale_k, mask=in_m, other=0.0)
            b_scale = tl.load(b_scale_ptr + n * b_scale_n + block * b_scale_k, mask=in_n, other=0.0)
            product += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        elif FAST:
            product = tl.dot(a, b, product)
        else:
            product += tl.dot(a, b)
        a_rows += _BLOCK
        b_rows += _BLOCK
    # the scale of a matrix without rows may be anything
    group = matrix.to(tl.int64)
    if SCALES == ROW:
        a_scale = tl.load(a_scale_ptr + group * M + m, mask=in_m, other=0.0)
        b_scale = tl.load(b_scale_ptr + group * N + n, mask=in_n, other=0.0)
        product = tl.where(blocks > 0, product * a_scale[:, None] * b_scale[None, :], 0.0)
    elif SCALES != BLOCKS:
        product = tl.where(blocks > 0, product * tl.load(a_scale_ptr + group) * tl.load(b_scale_ptr + group), 0.0)
    out = total_ptr + first_m.to(tl.int64) * N + first_n + at[:, None] * N + at[None, :]
    inside = in_m[:, None] & in_n[None, :]
    if ADDS:
        adds = tl.load(table_ptr + 3 * GROUPS + matrix) == 0
        product += tl.load(out, mask=inside & adds, other=0.0).to(tl.float32)
    tl.store(out, product.to(TOTAL), mask=inside)


def pad_groups(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """As the reference."""
    blocks = units_of(tuple(rows), BLOCK)[2]
    if blocks * BLOCK == x.shape[0]:
        return x
    out = torch.empty((blocks * BLOCK, x.shape[1]), dtype=x.dtype, device=x.device)
    grid = (blocks, -(-x.shape[1] // 64))
    constants = {**constants_of_groups(len(rows)), "BN": 64}
    launch(_pad_groups_kernel, grid, (x, out, _table(rows, x.device), x.shape[1]), constants)
    return out


def grouped_fp8_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: Sequence[torch.Tensor],
    b_scale: torch.Tensor,
    rows: Sequence[int],
    *,
    granularity: str,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """As the reference."""
    first, blocks, rows = b[0], granularity == "1x128", tuple(rows)
    N, K = first.shape
    out = torch.empty((units_of(rows)[2], N), dtype=out_dtype, device=a.device)
    arguments = (
        *(a, a_scale, b_scale, out),
        _table(rows, a.device, addresses_of(b)),
        *(N, K),
        *(a_scale.stride() if blocks else (0, 0)),
        first.stride(0),
        *(b_scale.stride()[:2] if blocks else (0, 0)),
    )
    constants = {
        "ELEMENT": _DTYPES[first.dtype],
        "SCALES": _NUMBERS[granularity],
        "FAST": fast_accumulation,
        **constants_of_groups(len(b)),
    }
    programs = units_of(rows, BLOCK)[2] * -(-N // BLOCK)
    launch(_grouped_fp8_gemm_kernel, programs, arguments, constants, num_warps=_WARPS, num_stages=_STAGES)
    return out


def grouped_fp8_wgrad_(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    rows: Sequence[int],
    totals: Sequence[torch.Tensor],
    *,
    granularity: str,
    overwrite: Sequence[bool],
    fast_accumulation: bool = False,
) -> None:
    """As the reference."""
    (M, tokens), N, of_blocks = a.shape, b.shape[0], granularity == "1x128"
    blocks, first_block, _ = units_of(tuple(rows), BLOCK)
    table = np.array((addresses_of(totals), blocks, first_block, overwrite), dtype=np.int64)
    programs = len(totals) * -(-M // BLOCK) * -(-N // BLOCK)
    arguments = (
        *(a, a_scale, b, b_scale),
        torch.from_numpy(table).to(a.device, non_blocking=True),
        *(M, N, tokens),
        *(a_scale.stride() if of_blocks else (0, 0)),
        *(b_scale.stride() if of_blocks else (0, 0)),
    )
    constants = {
        "TOTAL": _DTYPES[totals[0].dtype],
        "ADDS": not all(overwrite),
        "ALIGNED": not (table[0] % 16).any(),
        "SCALES": _NUMBERS[granularity],
        "FAST": fast_accumulation,
        "GROUPS": len(totals),
    }
    launch(_grouped_fp8_wgrad_kernel, programs, arguments, constants, num_warps=_WARPS, num_stages=_STAGES)


def _table(rows: Sequence[int], device: torch.device, *more: np.ndarray) -> torch.Tensor:
    """Rows, first padded row, first row and first block of each group, then ``more``."""
    (count, first_row, _), (_, first_block, _) = (units_of(tuple(rows), size) for size in (1, BLOCK))
    table = np.array((count, first_block * BLOCK, first_row, first_block, *more))
    return torch.from_numpy(table).to(device, non_blocking=True)
