"""One launch for all FP8 products of a group; equal to ``reference.py`` but for the sums over 128 of tensor cores."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.grouped_cast_fp8.reference import BLOCK
from megatron_lowprec.kernels.grouped_gemm.triton import Tiling, run_in_place
from megatron_lowprec.kernels.grouped_quantize.triton import constants_of_groups, group_of
from megatron_lowprec.kernels.launch import launch
from megatron_lowprec.kernels.matrices import addresses_of, units_of
from megatron_lowprec.kernels.tuning import Tuned

_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    DTYPES["e4m3"]: tl.float8e4nv,
    DTYPES["e5m2"]: tl.float8e5,
}
_BLOCK = tl.constexpr(BLOCK)

_NUMBERS = {"tensor": 0, "row": 1, "1x128": 2}
# named values of SCALES
ROW, BLOCKS = tl.constexpr(_NUMBERS["row"]), tl.constexpr(_NUMBERS["1x128"])

# A tile changes no sum: the terms of an output are added in the order of k, promoted every 128. A promoted sum takes
# twice the registers; a tile has columns of one block.
PROMOTED = (
    Tiling(64, 128, BLOCK, 4, 3),
    Tiling(64, 128, BLOCK, 4, 4),
    Tiling(128, 128, BLOCK, 8, 3),
)
FAST = (
    Tiling(128, 128, BLOCK, 4, 3),
    Tiling(128, 256, BLOCK, 8, 3),
    Tiling(256, 128, BLOCK, 8, 3),
)


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
    out_ptr,
    a,
    a_scale_ptr,
    b_scale_ptr,
    table_ptr,
    tokens,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Steps of one block; ``a`` describes tiles [BM, 128] of [tokens, K].

    Table, int64 [5, GROUPS]: rows, first padded row, first row, first tile, address of b.
    """
    tiles_n = tl.cdiv(N, BN)
    row_tile = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n
    matrix = group_of(table_ptr + 3 * GROUPS, row_tile, GROUPS, PADDED)
    first_own = (row_tile - tl.load(table_ptr + 3 * GROUPS + matrix).to(tl.int32)) * BM
    first_m = tl.load(table_ptr + GROUPS + matrix).to(tl.int32) + first_own
    first_n = tile_n * BN
    at_m, at_n = tl.arange(0, BM), tl.arange(0, BN)
    in_n = first_n + at_n < N
    group = matrix.to(tl.int64)
    b_ptr = tl.multiple_of(tl.load(table_ptr + 4 * GROUPS + matrix).to(tl.pointer_type(ELEMENT)), 16)
    # descriptors read zeros beyond K and the last row, and rows of the next group, whose products are not stored
    b = tl.make_tensor_descriptor(b_ptr, [N, K], [b_n, 1], [BN, _BLOCK])
    a_scales = a_scale_ptr + (first_m + at_m) * a_scale_m
    b_scales = b_scale_ptr + group * b_scale_group + tile_n * b_scale_n
    total = tl.zeros([BM, BN], tl.float32)
    for block in range(tl.cdiv(K, _BLOCK)):
        own, other = a.load([first_m, block * _BLOCK]), tl.trans(b.load([first_n, block * _BLOCK]))
        if SCALES == BLOCKS:
            a_scale = tl.load(a_scales + block * a_scale_k, mask=first_m + at_m < tokens, other=0.0)
            total += tl.dot(own, other) * a_scale[:, None] * tl.load(b_scales + block)
        elif FAST:
            total = tl.dot(own, other, total)
        else:
            total += tl.dot(own, other)
    if SCALES == ROW:
        a_scale = tl.load(a_scale_ptr + first_m + at_m, mask=first_m + at_m < tokens, other=0.0)
        b_scale = tl.load(b_scale_ptr + group * N + first_n + at_n, mask=in_n, other=0.0)
        total = total * a_scale[:, None] * b_scale[None, :]
    elif SCALES != BLOCKS:
        total = total * tl.load(a_scale_ptr + matrix) * tl.load(b_scale_ptr + matrix)
    out_tile = out_ptr + (tl.load(table_ptr + 2 * GROUPS + matrix) + first_own) * N + first_n
    mask = (first_own + at_m < tl.load(table_ptr + matrix))[:, None] & in_n[None, :]
    tl.store(out_tile + at_m[:, None] * N + at_n[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_fp8_wgrad_kernel(
    table_ptr,
    a,
    a_scale_ptr,
    b,
    b_scale_ptr,
    M,
    N,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """``a`` and ``b`` describe tiles [BM, 128] and [BN, 128] of [M, tokens] and [N, tokens].

    Table, int64 [4, GROUPS]: address of the total, blocks of rows, first block, whether it is overwritten.
    ADDS: some total is not overwritten. ALIGNED: all of them begin at multiples of 16 bytes.
    """
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * tiles_n
    matrix = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    total_ptr = tl.load(table_ptr + matrix).to(tl.pointer_type(TOTAL))
    if ALIGNED:
        total_ptr = tl.multiple_of(total_ptr, 16)
    blocks = tl.load(table_ptr + GROUPS + matrix).to(tl.int32)
    first_block = tl.load(table_ptr + 2 * GROUPS + matrix).to(tl.int32)
    first_m, first_n = (tile // tiles_n) * BM, (tile % tiles_n) * BN
    at_m, at_n = tl.arange(0, BM), tl.arange(0, BN)
    m, n = first_m + at_m, first_n + at_n
    in_m, in_n = m < M, n < N
    product = tl.zeros([BM, BN], tl.float32)
    for block in range(first_block, first_block + blocks):
        own, other = a.load([first_m, block * _BLOCK]), tl.trans(b.load([first_n, block * _BLOCK]))
        if SCALES == BLOCKS:
            a_scale = tl.load(a_scale_ptr + m * a_scale_m + block * a_scale_k, mask=in_m, other=0.0)
            b_scale = tl.load(b_scale_ptr + n * b_scale_n + block * b_scale_k, mask=in_n, other=0.0)
            product += tl.dot(own, other) * a_scale[:, None] * b_scale[None, :]
        elif FAST:
            product = tl.dot(own, other, product)
        else:
            product += tl.dot(own, other)
    # the scale of a matrix without rows may be anything
    group = matrix.to(tl.int64)
    if SCALES == ROW:
        a_scale = tl.load(a_scale_ptr + group * M + m, mask=in_m, other=0.0)
        b_scale = tl.load(b_scale_ptr + group * N + n, mask=in_n, other=0.0)
        product = tl.where(blocks > 0, product * a_scale[:, None] * b_scale[None, :], 0.0)
    elif SCALES != BLOCKS:
        product = tl.where(blocks > 0, product * tl.load(a_scale_ptr + group) * tl.load(b_scale_ptr + group), 0.0)
    out = total_ptr + first_m.to(tl.int64) * N + first_n + at_m[:, None] * N + at_n[None, :]
    inside = in_m[:, None] & in_n[None, :]
    if ADDS:
        adds = tl.load(table_ptr + 3 * GROUPS + matrix) == 0
        product += tl.load(out, mask=inside & adds, other=0.0).to(tl.float32)
    tl.store(out, product.to(TOTAL), mask=inside)


@lru_cache(maxsize=256)
def _tuned(name: str, fast: bool) -> Tuned[Tiling]:
    return Tuned(name, FAST if fast else PROMOTED)


def pad_groups(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """As the reference."""
    (count, first_row, _), (_, first_block, blocks) = (units_of(tuple(rows), size) for size in (1, BLOCK))
    if blocks * BLOCK == x.shape[0]:
        return x
    table = torch.from_numpy(np.array((count, first_block * BLOCK, first_row, first_block)))
    out = torch.empty((blocks * BLOCK, x.shape[1]), dtype=x.dtype, device=x.device)
    grid = (blocks, -(-x.shape[1] // 64))
    constants = {**constants_of_groups(len(rows)), "BN": 64}
    launch(_pad_groups_kernel, grid, (x, out, table.to(x.device, non_blocking=True), x.shape[1]), constants)
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
    (count, first_row, total), padded_row = units_of(rows), units_of(rows, BLOCK)[1] * BLOCK
    out = torch.empty((total, N), dtype=out_dtype, device=a.device)
    addresses, fast = addresses_of(b), fast_accumulation and not blocks

    def run(tiling: Tiling) -> None:
        _, first_tile, tiles = units_of(rows, tiling.BM)
        table = np.array((count, padded_row, first_row, first_tile, addresses))
        arguments = (
            *(out, TensorDescriptor.from_tensor(a, [tiling.BM, BLOCK]), a_scale, b_scale),
            torch.from_numpy(table).to(a.device, non_blocking=True),
            *(a.shape[0], N, K),
            *(a_scale.stride() if blocks else (0, 0)),
            first.stride(0),
            *(b_scale.stride()[:2] if blocks else (0, 0)),
        )
        constants = {
            "ELEMENT": _DTYPES[first.dtype],
            "SCALES": _NUMBERS[granularity],
            "FAST": fast,
            **constants_of_groups(len(b)),
            "BM": tiling.BM,
            "BN": tiling.BN,
        }
        programs = tiles * -(-N // tiling.BN)
        launch(
            _grouped_fp8_gemm_kernel, programs, arguments, constants, num_warps=tiling.warps, num_stages=tiling.stages
        )

    if total:
        run(_tuned(f"grouped FP8 product of [{N}, {K}], {granularity} scales", fast).choose(a.numel(), run, a.device))
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
    (blocks, first_block, _), first = units_of(tuple(rows), BLOCK), totals[0]
    fast = fast_accumulation and not of_blocks
    if not tokens:  # of which no descriptor can be made
        for total, writes in zip(totals, overwrite, strict=True):
            if writes:
                total.zero_()
        return

    def run(tiling: Tiling, addresses: np.ndarray, overwrites: Sequence[bool]) -> None:
        table = np.array((addresses, blocks, first_block, overwrites), dtype=np.int64)
        arguments = (
            torch.from_numpy(table).to(a.device, non_blocking=True),
            *(TensorDescriptor.from_tensor(a, [tiling.BM, BLOCK]), a_scale),
            *(TensorDescriptor.from_tensor(b, [tiling.BN, BLOCK]), b_scale),
            *(M, N),
            *(a_scale.stride() if of_blocks else (0, 0)),
            *(b_scale.stride() if of_blocks else (0, 0)),
        )
        constants = {
            "TOTAL": _DTYPES[first.dtype],
            "ADDS": not all(overwrites),
            "ALIGNED": not (addresses % 16).any(),
            "SCALES": _NUMBERS[granularity],
            "FAST": fast,
            "GROUPS": len(totals),
            "BM": tiling.BM,
            "BN": tiling.BN,
        }
        programs = len(totals) * -(-M // tiling.BM) * -(-N // tiling.BN)
        launch(
            _grouped_fp8_wgrad_kernel, programs, arguments, constants, num_warps=tiling.warps, num_stages=tiling.stages
        )

    tuned = _tuned(f"grouped FP8 weight gradient [{M}, {N}], {granularity} scales", fast)
    run_in_place(run, tuned, a, totals, overwrite)
