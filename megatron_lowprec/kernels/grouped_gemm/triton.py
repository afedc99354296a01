"""One launch for all products of a group, addresses in a table; equal to ``reference.py`` but for the order of sums."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.grouped_quantize.triton import group_of

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_TILE, _STEP, _WARPS, _STAGES = 128, 64, 8, 4  # not tuned


@triton.jit
def _grouped_gemm_kernel(
    a_ptr,
    out_ptr,
    table_ptr,
    N,
    K,
    stride_n,
    stride_k,
    alpha,
    ELEMENT: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Table, int64 [4, GROUPS]: address of b, rows, first row, first tile."""
    tiles_n = tl.cdiv(N, BN)
    row_tile = tl.program_id(0) // tiles_n
    matrix = group_of(table_ptr + 3 * GROUPS, row_tile, GROUPS, PADDED)
    b_ptr = tl.multiple_of(tl.load(table_ptr + matrix).to(tl.pointer_type(ELEMENT)), 16)
    M = tl.load(table_ptr + GROUPS + matrix).to(tl.int32)
    first_row = tl.load(table_ptr + 2 * GROUPS + matrix)
    m = (row_tile - tl.load(table_ptr + 3 * GROUPS + matrix).to(tl.int32)) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_rows = a_ptr + (first_row + m)[:, None] * K
    b_rows = b_ptr + n.to(tl.int64)[None, :] * stride_n
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        at = first + k
        a = tl.load(a_rows + at[None, :], mask=(m < M)[:, None] & (at < K)[None, :], other=0.0)
        b = tl.load(b_rows + at.to(tl.int64)[:, None] * stride_k, mask=(n < N)[None, :] & (at < K)[:, None], other=0.0)
        total = tl.dot(a, b, total)
    out = (total * alpha).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (first_row + m)[:, None] * N + n[None, :], out, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _grouped_wgrad_kernel(
    a_ptr,
    b_ptr,
    table_ptr,
    M,
    N,
    alpha,
    TOTAL: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Table, int64 [4, GROUPS]: address of the total, rows, first row, whether it is overwritten."""
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * tiles_n
    matrix = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    total_ptr = tl.load(table_ptr + matrix).to(tl.pointer_type(TOTAL))
    rows = tl.load(table_ptr + GROUPS + matrix).to(tl.int32)
    first_row = tl.load(table_ptr + 2 * GROUPS + matrix)
    overwrite = tl.load(table_ptr + 3 * GROUPS + matrix) != 0
    m = (tile // tiles_n) * BM + tl.arange(0, BM)
    n = (tile % tiles_n) * BN + tl.arange(0, BN)
    product = tl.zeros([BM, BN], tl.float32)
    for first in range(0, rows, BK):
        k = first + tl.arange(0, BK)
        row = (first_row + k)[:, None]
        a = tl.load(a_ptr + row * M + m[None, :], mask=(k < rows)[:, None] & (m < M)[None, :], other=0.0)
        b = tl.load(b_ptr + row * N + n[None, :], mask=(k < rows)[:, None] & (n < N)[None, :], other=0.0)
        product = tl.dot(tl.trans(a), b, product)
    at = total_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    before = tl.load(at, mask=inside & (overwrite == 0), other=0.0).to(tl.float32)
    tl.store(at, (before + product * alpha).to(TOTAL), mask=inside)


def grouped_gemm(
    a: torch.Tensor, b: Sequence[torch.Tensor], rows: Sequence[int], *, alpha: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """As the reference."""
    (T, K), (N, _), device = a.shape, b[0].shape, a.device
    out = torch.empty((T, N), dtype=out_dtype, device=device)
    count = np.array(rows, dtype=np.int64)
    tiles = -(-count // _TILE)
    programs = int(tiles.sum()) * -(-N // _TILE)
    if programs:
        table = np.stack(
            (np.array([one.data_ptr() for one in b]), count, count.cumsum() - count, tiles.cumsum() - tiles)
        )
        _grouped_gemm_kernel[(programs,)](
            a,
            out,
            torch.from_numpy(table).to(device, non_blocking=True),
            N,
            K,
            *b[0].stride(),
            alpha,
            ELEMENT=_DTYPES[a.dtype],
            GROUPS=len(b),
            PADDED=triton.next_power_of_2(len(b)),
            BM=_TILE,
            BN=_TILE,
            BK=_STEP,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return out


def grouped_wgrad_(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: Sequence[int],
    totals: Sequence[torch.Tensor],
    *,
    alpha: float,
    overwrite: Sequence[bool],
) -> None:
    """As the reference."""
    (M, N), count = totals[0].shape, np.array(rows, dtype=np.int64)
    table = np.stack(
        (
            np.array([total.data_ptr() for total in totals]),
            count,
            count.cumsum() - count,
            np.array(overwrite, dtype=np.int64),
        )
    )
    _grouped_wgrad_kernel[(len(totals) * -(-M // _TILE) * -(-N // _TILE),)](
        a,
        b,
        torch.from_numpy(table).to(a.device, non_blocking=True),
        M,
        N,
        alpha,
        TOTAL=_DTYPES[totals[0].dtype],
        GROUPS=len(totals),
        BM=_TILE,
        BN=_TILE,
        BK=_STEP,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
