"""FP8 codes and scales of one tile of a matrix, within a Triton program."""

import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger
from megatron_lowprec.kernels.cast_fp8.triton_ops import (
    BLOCK_1X128,
    BLOCK_128X128,
    ROW,
    TENSOR,
    as_stored,
    below,
    both_scales,
    four_to_fp8,
    observe,
    places,
    read,
    to_fp8,
)


@triton.jit
def cast_tile(
    source,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    observed_ptr,
    sums_ptr,
    tile_m,
    tile_n,
    M,
    height,
    padded_M,
    N,
    stride,
    CAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Codes and scales in the directions of ``CAST``."""
    # one scale for the tile: its codes serve both directions
    ONE: tl.constexpr = CAST.GRANULARITY == TENSOR or CAST.GRANULARITY == BLOCK_128X128
    if CAST.ALONG_ROWS and not ONE:
        cast_rows(
            source, row_ptr, row_scale_ptr, amax_ptr, observed_ptr, sums_ptr,
            tile_m, tile_n, M, height, N, stride, CAST, BM, BN, ROWS
        )  # fmt: skip
    if CAST.ALONG_COLUMNS or ONE:
        # after cast_rows this reads the tile from the cache
        cast_words(
            source, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, observed_ptr, sums_ptr,
            tile_m, tile_n, M, height, padded_M, N, stride, CAST, BM, BN, COLUMNS
        )  # fmt: skip


@triton.jit
def cast_rows(
    source,
    row_ptr,
    row_scale_ptr,
    amax_ptr,
    observed_ptr,
    sums_ptr,
    tile_m,
    tile_n,
    M,
    height,
    N,
    stride,
    CAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rowwise codes with one scale for each row, or for each row of the tile.

    The tile has shape [BN / 32, rows, 32]: four threads share a row, so each computes few scales.
    """
    CHUNK: tl.constexpr = 32
    BF16: tl.constexpr = source[0].dtype.element_ty == tl.bfloat16
    CODES: tl.constexpr = CAST.CODES
    OF_BF16: tl.constexpr = CODES.NATIVE and CAST.GRANULARITY == BLOCK_1X128 and BF16
    out = row_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    total = tl.zeros([BN // CHUNK, 1, CHUNK], tl.float32)
    for part in range(BM // ROWS):
        rows = tile_m * BM + part * ROWS + tl.arange(0, ROWS)
        row, col = places(rows, tile_n * BN, BN, CHUNK)
        x = read(source, rows, tile_n * BN, M, N, stride, CAST, BN, CHUNK)
        if CAST.SUMS and not CAST.ALONG_COLUMNS:
            total += tl.sum(x, 1, keep_dims=True)
        x = as_stored(x, BF16, CAST)
        if CAST.OBSERVES and not CAST.ALONG_COLUMNS:
            observe(observed_ptr, amax_along(amax_along(amax_along(tl.abs(x), 2), 0), 1))
        if CAST.GRANULARITY == ROW:
            amax = tl.load(amax_ptr + row, mask=below(row, M, CAST), other=0.0)
        else:
            amax = amax_along(amax_along(tl.abs(x), 0), 2)
        scale, decode = both_scales(amax, CAST, OF_BF16)
        if CAST.GRANULARITY == ROW:
            tl.store(row_scale_ptr + row, decode, mask=below(row, M, CAST) & (tile_n == 0))
        else:
            tl.store(row_scale_ptr + tile_n * height + row, decode, mask=below(row, height, CAST))
        codes = to_fp8(x * scale, CODES)
        tl.store(out + row.to(tl.int64) * N + col, codes, mask=below(row, height, CAST) & below(col, N, CAST))
    if CAST.SUMS and not CAST.ALONG_COLUMNS:
        row, col = places(tl.arange(0, 1), tile_n * BN, BN, CHUNK)
        tl.store(sums_ptr + tile_m * N + row + col, total, mask=below(col, N, CAST))


@triton.jit
def cast_words(
    source,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    observed_ptr,
    sums_ptr,
    tile_m,
    tile_n,
    M,
    height,
    padded_M,
    N,
    stride,
    CAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Columnwise codes; if the tile has one scale, rowwise codes as well.

    A thread holds four consecutive rows of its columns, one in each of four tensors of equal layout. It packs their
    codes into one word of the transposed operand, so words cross shared memory instead of bytes.
    """
    BF16: tl.constexpr = source[0].dtype.element_ty == tl.bfloat16
    CODES: tl.constexpr = CAST.CODES
    OF_BF16: tl.constexpr = CODES.NATIVE and CAST.GRANULARITY == BLOCK_1X128 and BF16
    ONE: tl.constexpr = CAST.GRANULARITY == TENSOR or CAST.GRANULARITY == BLOCK_128X128
    row_out = row_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    col_out = col_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    words = tl.arange(0, BM // 4)
    rows = tile_m * BM + 4 * words
    one = tl.zeros([1, 1], tl.int32)
    largest = tl.zeros([BM // 4, COLUMNS], tl.float32)
    # amax of granularity "tensor"; for others the compiler drops this
    given = tl.load(amax_ptr + one) if CAST.GRANULARITY == TENSOR else tl.zeros([1, 1], tl.float32)
    given_scale, given_decode = both_scales(given, CAST, OF_BF16)
    for part in range(BN // COLUMNS):
        first = tile_n * BN + part * COLUMNS
        row, col = places(rows, first, COLUMNS, COLUMNS)
        x0 = read(source, rows, first, M, N, stride, CAST, COLUMNS, COLUMNS)
        x1 = read(source, rows + 1, first, M, N, stride, CAST, COLUMNS, COLUMNS)
        x2 = read(source, rows + 2, first, M, N, stride, CAST, COLUMNS, COLUMNS)
        x3 = read(source, rows + 3, first, M, N, stride, CAST, COLUMNS, COLUMNS)
        if CAST.SUMS:
            total = tl.sum((x0 + x1) + (x2 + x3), 0, keep_dims=True)
            tl.store(sums_ptr + tile_m * N + col, total, mask=below(col, N, CAST))
        x0, x1 = as_stored(x0, BF16, CAST), as_stored(x1, BF16, CAST)
        x2, x3 = as_stored(x2, BF16, CAST), as_stored(x3, BF16, CAST)
        found = larger(larger(tl.abs(x0), tl.abs(x1)), larger(tl.abs(x2), tl.abs(x3)))
        if CAST.OBSERVES:
            largest = larger(largest, found)
        if CAST.GRANULARITY == TENSOR:
            scale, decode = given_scale, given_decode
        else:
            if CAST.GRANULARITY == ROW:
                amax = tl.load(amax_ptr + M + col, mask=below(col, N, CAST), other=0.0)
            else:
                amax = amax_along(found, 0) if CAST.GRANULARITY == BLOCK_1X128 else amax_along(amax_along(found, 1), 0)
            scale, decode = both_scales(amax, CAST, OF_BF16)
        if CAST.GRANULARITY == ROW:
            tl.store(col_scale_ptr + col, decode, mask=below(col, N, CAST) & (tile_m == 0))
        elif CAST.GRANULARITY == BLOCK_1X128:
            tl.store(col_scale_ptr + tile_m * N + col, decode, mask=below(col, N, CAST))
        elif CAST.GRANULARITY == BLOCK_128X128:
            if CAST.ALONG_ROWS:
                pitch = tl.cdiv(tl.cdiv(N, BN), 4) * 4
                tl.store(row_scale_ptr + tile_m * pitch + tile_n + one, decode)
            if CAST.ALONG_COLUMNS:
                pitch = tl.cdiv(tl.cdiv(padded_M, BM), 4) * 4
                tl.store(col_scale_ptr + tile_n * pitch + tile_m + one, decode)
        if CAST.ALONG_ROWS and ONE:
            for four in tl.static_range(4):
                x = x0 if four == 0 else (x1 if four == 1 else (x2 if four == 2 else x3))
                codes = to_fp8(x * scale, CODES)
                inside = below(row + four, height, CAST) & below(col, N, CAST)
                tl.store(row_out + (row + four).to(tl.int64) * N + col, codes, mask=inside)
        if CAST.ALONG_COLUMNS:
            packed = four_to_fp8(x0 * scale, x1 * scale, x2 * scale, x3 * scale, CODES)
            to = col.to(tl.int64) * (padded_M // 4) + (tile_m * (BM // 4) + words[:, None])
            tl.store(col_out + to, packed, mask=below(col, N, CAST) & below(row, padded_M, CAST))
    if CAST.OBSERVES:
        observe(observed_ptr, amax_along(amax_along(largest, 1), 0))
    if CAST.GRANULARITY == TENSOR:
        leads = tile_m + tile_n + one == 0
        if CAST.ALONG_ROWS:
            tl.store(row_scale_ptr + one, given_decode, mask=leads)
        if CAST.ALONG_COLUMNS:
            tl.store(col_scale_ptr + one, given_decode, mask=leads)
