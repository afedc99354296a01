"""One launch for all products of a group, addresses in a table; equal to ``reference.py`` but for the order of sums."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.grouped_quantize.triton import constants_of_groups, group_of
from megatron_lowprec.kernels.launch import launch
from megatron_lowprec.kernels.matrices import addresses_of, units_of
from megatron_lowprec.kernels.tuning import Tuned

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Tiling(NamedTuple):
    """Rows and columns of a program's tile, terms of the contraction at once, warps, stages of the pipeline."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


# A tile changes no sum: the terms of an output are added in the order of k. Stages of fp32 take twice the memory.
TILINGS = {
    torch.bfloat16: (
        Tiling(128, 128, 64, 8, 4),
        Tiling(128, 256, 64, 8, 3),
        Tiling(128, 256, 64, 8, 4),
        Tiling(256, 128, 64, 8, 3),
        Tiling(128, 128, 64, 4, 4),
        Tiling(64, 256, 64, 4, 4),
    ),
    torch.float32: (Tiling(128, 128, 32, 8, 3),),
}


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
    ALPHAS: tl.constexpr,
    ELEMENT: tl.constexpr,
    EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Table, int64 [4, GROUPS]: address of b, rows, first row, first tile.

    ALPHAS: ``alpha`` points to one a group. EVEN: N and K are multiples of the tile's.
    """
    tiles_n = tl.cdiv(N, BN)
    row_tile = tl.program_id(0) // tiles_n
    matrix = group_of(table_ptr + 3 * GROUPS, row_tile, GROUPS, PADDED)
    b_ptr = tl.multiple_of(tl.load(table_ptr + matrix).to(tl.pointer_type(ELEMENT)), 16)
    first_m = (row_tile - tl.load(table_ptr + 3 * GROUPS + matrix).to(tl.int32)) * BM
    first_n = (tl.program_id(0) % tiles_n) * BN
    M = tl.load(table_ptr + GROUPS + matrix).to(tl.int32) - first_m
    first_row = tl.load(table_ptr + 2 * GROUPS + matrix) + first_m
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    # 64-bit addresses of tiles, 32-bit offsets inside
    a_tile = a_ptr + first_row * K
    b_tile = b_ptr + first_n.to(tl.int64) * stride_n
    a_offsets = m[:, None] * K + k[None, :]
    b_offsets = n[None, :] * stride_n + k[:, None] * stride_k
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        if EVEN:
            a = tl.load(a_tile + a_offsets, mask=(m < M)[:, None], other=0.0)
            b = tl.load(b_tile + b_offsets)
        else:
            inside = first + k < K
            a = tl.load(a_tile + a_offsets, mask=(m < M)[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_tile + b_offsets, mask=(first_n + n < N)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
        a_tile += BK
        b_tile += BK * stride_k
    if ALPHAS:
        alpha = tl.load(alpha + matrix)
    out = (total * alpha).to(out_ptr.dtype.element_ty)
    out_tile = out_ptr + first_row * N + first_n
    tl.store(out_tile + m[:, None] * N + n[None, :], out, mask=(m < M)[:, None] & (first_n + n < N)[None, :])


@triton.jit
def _grouped_wgrad_kernel(
    a_ptr,
    b_ptr,
    table_ptr,
    M,
    N,
    alpha,
    ALPHAS: tl.constexpr,
    TOTAL: tl.constexpr,
    ADDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Table, int64 [4, GROUPS]: address of the total, rows, first row, whether it is overwritten.

    ALPHAS: ``alpha`` points to one a group. ADDS: some total is not overwritten. ALIGNED: all of them begin at
    multiples of 16 bytes.
    """
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * tiles_n
    matrix = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    total_ptr = tl.load(table_ptr + matrix).to(tl.pointer_type(TOTAL))
    if ALIGNED:
        total_ptr = tl.multiple_of(total_ptr, 16)
    rows = tl.load(table_ptr + GROUPS + matrix).to(tl.int32)
    first_row = tl.load(table_ptr + 2 * GROUPS + matrix)
    first_m, first_n = (tile // tiles_n) * BM, (tile % tiles_n) * BN
    # zeros beyond the group's rows
    a = tl.make_tensor_descriptor(tl.multiple_of(a_ptr + first_row * M, 16), [rows, M], [M, 1], [BK, BM])
    b = tl.make_tensor_descriptor(tl.multiple_of(b_ptr + first_row * N, 16), [rows, N], [N, 1], [BK, BN])
    product = tl.zeros([BM, BN], tl.float32)
    for k in range(0, rows, BK):
        product = tl.dot(tl.trans(a.load([k, first_m])), b.load([k, first_n]), product)
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    at = total_ptr + first_m.to(tl.int64) * N + first_n + m[:, None] * N + n[None, :]
    inside = (first_m + m < M)[:, None] & (first_n + n < N)[None, :]
    if ALPHAS:
        alpha = tl.load(alpha + matrix)
    product *= alpha
    if ADDS:
        adds = tl.load(table_ptr + 3 * GROUPS + matrix) == 0
        product += tl.load(at, mask=inside & adds, other=0.0).to(tl.float32)
    tl.store(at, product.to(TOTAL), mask=inside)


@lru_cache(maxsize=256)
def _tuned(name: str, dtype: torch.dtype) -> Tuned[Tiling]:
    return Tuned(name, TILINGS[dtype])


def grouped_gemm(
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    rows: Sequence[int],
    *,
    alpha: float | torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As the reference."""
    (T, K), first, device, rows = a.shape, b[0], a.device, tuple(rows)
    N, strides = first.shape[0], first.stride()
    out = torch.empty((T, N), dtype=out_dtype, device=device)
    count, first_row, total = units_of(rows)
    if not total:
        return out
    addresses = addresses_of(b)

    def run(tiling: Tiling) -> None:
        _, first_tile, tiles = units_of(rows, tiling.BM)
        table = np.array((addresses, count, first_row, first_tile))
        on_device = torch.from_numpy(table).to(device, non_blocking=True)
        constants = {
            "ALPHAS": isinstance(alpha, torch.Tensor),
            "ELEMENT": _DTYPES[a.dtype],
            "EVEN": N % tiling.BN == 0 and K % tiling.BK == 0,
            **constants_of_groups(len(b)),
            "BM": tiling.BM,
            "BN": tiling.BN,
            "BK": tiling.BK,
        }
        launch(
            _grouped_gemm_kernel,
            tiles * -(-N // tiling.BN),
            (a, out, on_device, N, K, *strides, alpha),
            constants,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )

    kind = f"grouped product of [{N}, {K}], {'transposed' if strides[1] != 1 else 'row-major'}"
    run(_tuned(kind, a.dtype).choose(T * K, run, device))
    return out


def grouped_wgrad_(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: Sequence[int],
    totals: Sequence[torch.Tensor],
    *,
    alpha: float | torch.Tensor,
    overwrite: Sequence[bool],
) -> None:
    """As the reference."""
    first = totals[0]
    (M, N), (count, first_row, _) = first.shape, units_of(tuple(rows))

    def run(tiling: Tiling, addresses: np.ndarray, overwrites: Sequence[bool]) -> None:
        table = np.array((addresses, count, first_row, overwrites), dtype=np.int64)
        on_device = torch.from_numpy(table).to(a.device, non_blocking=True)
        constants = {
            "ALPHAS": isinstance(alpha, torch.Tensor),
            "TOTAL": _DTYPES[first.dtype],
            "ADDS": not all(overwrites),
            "ALIGNED": not (addresses % 16).any(),
            "GROUPS": len(totals),
            "BM": tiling.BM,
            "BN": tiling.BN,
            "BK": tiling.BK,
        }
        launch(
            _grouped_wgrad_kernel,
            len(totals) * -(-M // tiling.BM) * -(-N // tiling.BN),
            (a, b, on_device, M, N, alpha),
            constants,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )

    tuned = _tuned(f"grouped weight gradient [{M}, {N}]", a.dtype)
    run_in_place(run, tuned, a, totals, overwrite)


def run_in_place(
    run: Callable[[Tiling, np.ndarray, Sequence[bool]], None],
    tuned: Tuned[Tiling],
    a: torch.Tensor,
    totals: Sequence[torch.Tensor],
    overwrite: Sequence[bool],
) -> None:
    """``run`` with the tiling of an operand a, the addresses of ``totals`` and ``overwrite``."""

    def measure(tiling: Tiling) -> None:
        # Measuring must not add to the gradients. The tensor lives until the launch is queued: memory freed before
        # would be the table's, and the kernel would overwrite the addresses that it reads.
        scratch = torch.empty_like(totals[0])
        run(tiling, np.full(len(totals), scratch.data_ptr()), [True] * len(totals))

    run(tuned.choose(a.numel(), measure, a.device), addresses_of(totals), overwrite)
