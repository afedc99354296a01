"""Statistics of the rounding of an operand in one pass over source, codes and scales.

A program visits tiles and writes one row of partial results. The last program to finish combines all rows in their
order, in the same launch. The number of programs depends only on the size, so the result is deterministic.

A tile is split into cells of eight entries, which one thread holds. A cell is added in fp32 and cells in fp64, so that
threads exchange nothing before the end. A cell's squares are taken after a division by the power of two of the larger
amax of x and q: neither gradients of 1e-30 nor of 1e30 leave fp32.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.amax.triton_ops import amax_along
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.interpreted import INTERPRETED
from megatron_lowprec.kernels.launch import Specialized, specialized_on
from megatron_lowprec.kernels.operand_stats.reference import MAXIMA, SLACK, SUMS
from megatron_lowprec.kernels.quantize.triton_ops import power_of_two

_PROGRAMS = 1024
_CELL = tl.constexpr(8)
_TILE, _COLUMNS = 2048, 64  # 16 entries a thread, and columns without a transform: whole sectors in both directions
_SUMS, _COUNTS = tl.constexpr(SUMS), tl.constexpr(SUMS + MAXIMA)
_COUNTED = tl.constexpr(16)  # _COUNTS up to a power of two
_COMBINED = tl.constexpr(64)  # programs' rows that are combined at a time
_SPECIALS = {"none": 0, "nan": 1, "ieee": 2}


class _Constants(NamedTuple):
    """The constexpr ``S``: numbers fixed at compile time.

    Attributes:
        CODE_BITS: bits of a code; 0 where data are values.
        MANTISSA, MIN_EXPONENT, SPECIALS: properties of the format.
        BLOCK_ROWS, BLOCK_COLUMNS: of a scale; 0 for all.
        SCALES: scales along the columns of a tile; 0 if the data have none.
        HEADROOM: divides the decoded values.
        REACH: largest source, in units of the decode scale, that does not saturate.
        GROUP: block of the Hadamard transform, 1 without one.
    """

    CODE_BITS: int
    MANTISSA: int
    MIN_EXPONENT: int
    SPECIALS: int
    BLOCK_ROWS: int
    BLOCK_COLUMNS: int
    SCALES: int
    HEADROOM: float
    REACH: float
    GROUP: int


@triton.jit
def _decoded(code, S: tl.constexpr):
    """Codes in the low bits, int32 -> fp32 values, special codes included."""
    magnitude = code & ((1 << (S.CODE_BITS - 1)) - 1)
    # fp32 with the format's exponent field, subnormal numbers included, has the value up to a power of two
    value = (magnitude << (23 - S.MANTISSA)).to(tl.float32, bitcast=True) * 2.0 ** (126 + S.MIN_EXPONENT)
    if S.SPECIALS == 1:
        value = tl.where(magnitude == (1 << (S.CODE_BITS - 1)) - 1, float("nan"), value)
    if S.SPECIALS == 2:
        INF: tl.constexpr = ((1 << (S.CODE_BITS - 1 - S.MANTISSA)) - 1) << S.MANTISSA
        value = tl.where(magnitude == INF, float("inf"), tl.where(magnitude > INF, float("nan"), value))
    sign = (code >> (S.CODE_BITS - 1)) << 31
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _sylvester(signs_ptr, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """Matrix [GROUP, GROUP] of the Hadamard transform of signed entries, of +1 and -1."""
    index = tl.arange(0, GROUP)
    parity = index[:, None] & index[None, :]
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    signs = tl.load(signs_ptr + index)
    matrix = signs[:, None] * (1 - 2 * parity).to(tl.float32)
    return matrix if INTERPRETED else matrix.to(DTYPE)  # the interpreter's product knows no bf16


@triton.jit
def _transformed(x, sylvester, GROUP: tl.constexpr):
    """Hadamard transform of x [ROWS, GROUP] as a product on tensor cores, fp32.

    Its sums have another order than the quantizer's butterflies, which would take 64 registers a thread here.
    """
    if INTERPRETED:
        x = x.to(tl.float32)
    return tl.dot(x, sylvester, input_precision="ieee") * (GROUP**-0.5)


@triton.jit
def _over_cells(scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile's scales [rows, columns], each size 1 where a tile has one, for every cell, which lies in one block:
    [ROWS, COLUMNS / _CELL, 1].
    """
    ACROSS: tl.constexpr = scale.shape[1]
    wide = tl.broadcast_to(tl.expand_dims(scale, 2), [ROWS, ACROSS, COLUMNS // _CELL // ACROSS])
    return tl.expand_dims(tl.reshape(wide, [ROWS, COLUMNS // _CELL]), 2)


@triton.jit
def _cells(v, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile's cells, parts of rows: [ROWS, COLUMNS / _CELL, _CELL]."""
    return tl.reshape(v, [ROWS, COLUMNS // _CELL, _CELL])


@triton.jit
def _sum(v):
    """Sum of all cells, [1, 1, 1]."""
    return tl.sum(tl.sum(tl.sum(v, 2, keep_dims=True), 1, keep_dims=True), 0, keep_dims=True)


@triton.jit
def _max(v):
    return tl.max(tl.max(tl.max(v, 2, keep_dims=True), 1, keep_dims=True), 0, keep_dims=True)


@triton.jit
def _operand_stats_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    signs_ptr,
    parts_ptr,
    finished_ptr,
    out_ptr,
    R,
    K,
    padded_K,
    x_row,
    x_column,
    data_row,
    data_column,
    scale_row,
    scale_column,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across = tl.cdiv(padded_K, COLUMNS)
    tiles = tl.cdiv(R, ROWS) * across
    if S.GROUP > 1:
        sylvester = _sylvester(signs_ptr, COLUMNS, x_ptr.dtype.element_ty)
    empty = tl.zeros([ROWS, COLUMNS // _CELL, 1], tl.float32)
    energy, error, product = empty.to(tl.float64), empty.to(tl.float64), empty.to(tl.float64)
    nonzero, underflows, saturated = empty.to(tl.int32), empty.to(tl.int32), empty.to(tl.int32)
    amax_bits, largest, smallest = empty.to(tl.int32), empty, empty + float("inf")
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first_column = (tile % across) * COLUMNS
        row = ((tile // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        column = (first_column + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
        inside = (row < R) & (column < padded_K)
        x = tl.load(x_ptr + row * x_row + column * x_column, mask=inside & (column < K), other=0.0)
        if S.GROUP > 1:
            x = _transformed(x, sylvester, COLUMNS)  # type: ignore[possibly-undefined]
        x = _cells(x, ROWS, COLUMNS).to(tl.float32)
        if S.CODE_BITS == 4:
            pair = (first_column // 2 + tl.arange(0, COLUMNS // 2)).to(tl.int64)[None, :]
            both = (row < R) & (pair < padded_K // 2)  # K is whole bytes
            byte = tl.load(data_ptr + row * data_row + pair * data_column, mask=both, other=0)
            byte = tl.reshape(byte, [ROWS, COLUMNS // _CELL, _CELL // 2]).to(tl.int32)
            grid = _decoded(tl.reshape(tl.join(byte & 15, byte >> 4), [ROWS, COLUMNS // _CELL, _CELL]), S)
        else:
            loaded = tl.load(data_ptr + row * data_row + column * data_column, mask=inside, other=0)
            loaded = _cells(loaded, ROWS, COLUMNS)
            if S.CODE_BITS:  # noqa: SIM108  Triton compiles one branch of an if, and both of an expression
                grid = _decoded(loaded.to(tl.int32), S)
            else:
                grid = loaded.to(tl.float32)
        if S.SCALES:
            if S.BLOCK_ROWS:  # noqa: SIM108
                block_row = row // S.BLOCK_ROWS
            else:
                block_row = tl.zeros([1, 1], tl.int64)
            if S.BLOCK_COLUMNS:
                block_column = (first_column // S.BLOCK_COLUMNS + tl.arange(0, S.SCALES)).to(tl.int64)[None, :]
            else:
                block_column = tl.zeros([1, 1], tl.int64)
            has_scale = (block_row * S.BLOCK_ROWS < R) & (block_column * S.BLOCK_COLUMNS < padded_K)
            scale = tl.load(scale_ptr + block_row * scale_row + block_column * scale_column, mask=has_scale, other=0)
            if scale.dtype == tl.uint8:
                scale = power_of_two(scale.to(tl.int32))
        else:
            scale = tl.full([1, 1], 1.0, tl.float32)

        q = grid * _over_cells(scale * (1.0 / S.HEADROOM), ROWS, COLUMNS)
        magnitude, is_nonzero = tl.abs(x), x != 0.0
        bits = amax_along(magnitude, 2).to(tl.int32, bitcast=True)
        amax_bits = tl.maximum(amax_bits, bits)
        # 2^-e of the larger amax of x and q, which brings both below 2
        q_bits = amax_along(tl.abs(q), 2).to(tl.int32, bitcast=True)
        binade = tl.minimum(tl.maximum(tl.maximum(bits, q_bits) & 0x7F800000, 1 << 23), 253 << 23)
        shrink = ((254 << 23) - binade).to(tl.float32, bitcast=True)
        grow = binade.to(tl.float32, bitcast=True).to(tl.float64)
        grow = grow * grow
        small_x, small_q = x * shrink, q * shrink
        difference = small_q - small_x
        energy += tl.sum(small_x * small_x, 2, keep_dims=True).to(tl.float64) * grow
        error += tl.sum(difference * difference, 2, keep_dims=True).to(tl.float64) * grow
        product += tl.sum(small_q * small_x, 2, keep_dims=True).to(tl.float64) * grow
        counts = is_nonzero.to(tl.int32) + tl.where(is_nonzero & (q == 0.0), 1 << 8, 0)
        if S.SCALES:
            reach = _over_cells(scale * S.REACH, ROWS, COLUMNS)
            counts += tl.where((magnitude > reach) & (reach > 0.0), 1 << 16, 0)
            high = _over_cells(tl.where(scale == scale, scale, 0.0), ROWS, COLUMNS)
            # a coded scale may be zero
            low = _over_cells(tl.where(scale > 0.0, scale, float("inf")), ROWS, COLUMNS)
            largest = tl.maximum(largest, tl.where(bits != 0, high, 0.0))
            smallest = tl.minimum(smallest, tl.where(bits != 0, low, float("inf")))
        counts = tl.sum(counts, 2, keep_dims=True)
        nonzero += counts & 255
        underflows += (counts >> 8) & 255
        saturated += counts >> 16
    zero = tl.zeros([1, 1, 1], tl.float64)
    part = parts_ptr + tl.program_id(0) * _COUNTS + tl.zeros([1, 1, 1], tl.int32)
    tl.store(part, (zero + R) * padded_K * (tl.program_id(0) == 0))  # of all programs
    tl.store(part + 1, _sum(nonzero).to(tl.float64))
    tl.store(part + 2, _sum(underflows).to(tl.float64))
    tl.store(part + 3, _sum(saturated).to(tl.float64))
    tl.store(part + 4, _sum(energy))
    tl.store(part + 5, _sum(error))
    tl.store(part + 6, _sum(product))
    tl.store(part + 7, _max(amax_bits).to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(part + 8, _max(largest).to(tl.float64))
    tl.store(part + 9, _max(1.0 / smallest.to(tl.float64)))
    tl.debug_barrier()  # all threads' rows precede the count
    if tl.atomic_add(finished_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        _combine(parts_ptr, out_ptr)


@triton.jit
def _combine(parts_ptr, out_ptr):
    """Sums and maxima of all programs' rows."""
    column = tl.arange(0, _COUNTED)
    sums = tl.zeros([_COUNTED], tl.float64)
    # numbers that are not negative compare as their bits do, and so NaN is the largest
    maxima = tl.zeros([_COUNTED], tl.int64)
    for first in range(0, tl.num_programs(0), _COMBINED):
        row = first + tl.arange(0, _COMBINED)
        inside = (row < tl.num_programs(0))[:, None] & (column < _COUNTS)[None, :]
        values = tl.load(parts_ptr + row[:, None] * _COUNTS + column[None, :], mask=inside, other=0.0)
        sums += tl.sum(values, 0)
        maxima = tl.maximum(maxima, tl.max(values.to(tl.int64, bitcast=True), 0))
    combined = tl.where(column < _SUMS, sums, maxima.to(tl.float64, bitcast=True))
    tl.store(out_ptr + column, combined, mask=column < _COUNTS)


def operand_stats(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    fmt: Format | None,
    block: tuple[int, int] = (1, 1),
    headroom: float = 1.0,
    signs: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``reference.operand_stats``: equal counts and maxima, sums within the rounding of fp32.

    Under a transform x itself is within the rounding of fp32, so an entry at a threshold may count differently.
    """
    rows, columns = x.shape
    group = 1 if signs is None else signs.numel()
    padded = -(-columns // group) * group
    if data.dtype in DTYPES.values():
        data = data.view(torch.uint8)
    tile_columns = _COLUMNS if signs is None else group
    # 16 rows at least for a product, and less than 64: Triton 3.7 cannot compile what follows one in tensor memory
    tile_rows = max(16, min(32, _TILE // tile_columns))
    constants = _constants(data, scale, fmt, block, headroom, group, tile_columns)
    programs = min(_PROGRAMS, triton.cdiv(rows, tile_rows) * triton.cdiv(padded, tile_columns))
    parts = torch.empty((programs, SUMS + MAXIMA), dtype=torch.float64, device=x.device)
    finished = torch.zeros(1, dtype=torch.int32, device=x.device)
    out = torch.empty(SUMS + MAXIMA, dtype=torch.float64, device=x.device)
    arguments = (
        x,
        data,
        x if scale is None else scale,
        x if signs is None else signs,
        *(parts, finished, out),
        *(rows, columns, padded),
        *x.stride(),
        *data.stride(),
        *((0, 0) if scale is None else scale.stride()),
    )
    _launcher(constants, tile_rows, tile_columns).launch(programs, x.device, arguments, specialized_on(arguments))
    return out


def _constants(
    data: torch.Tensor,
    scale: torch.Tensor | None,
    fmt: Format | None,
    block: tuple[int, int],
    headroom: float,
    group: int,
    columns: int,
) -> _Constants:
    if scale is None or fmt is None:
        return _Constants(0, 0, 0, 0, 0, 0, 0, headroom, 0.0, group)
    return _Constants(
        CODE_BITS=0 if data.is_floating_point() else fmt.bits,
        MANTISSA=fmt.mantissa_bits,
        MIN_EXPONENT=fmt.min_exponent,
        SPECIALS=_SPECIALS[fmt.specials],
        BLOCK_ROWS=block[0] if scale.shape[0] > 1 else 0,
        BLOCK_COLUMNS=block[1] if scale.shape[1] > 1 else 0,
        SCALES=max(1, columns // block[1]) if scale.shape[1] > 1 else 1,
        HEADROOM=headroom,
        REACH=fmt.max * SLACK / headroom,
        GROUP=group,
    )


@lru_cache(maxsize=256)
def _launcher(constants: _Constants, rows: int, columns: int) -> Specialized:
    return Specialized(
        _operand_stats_kernel,
        {"S": constants, "ROWS": rows, "COLUMNS": columns},
        num_warps=4,
        enable_fp_fusion=False,  # q - x of a fused product would not be that of the stored q
    )
