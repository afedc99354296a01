"""FP8 operands of a matrix and of its transpose from one read, and the amax they need; bits equal to ``reference.py``.

The codes are those of ``kernels.quantize.reference.quantize_operand``. A matrix [M, N] gives codes along its rows,
[M, N], and along its columns, [N, M padded]: both are contracted along their last dimension, as Hopper's FP8 products
want it. bf16 in and both ways out are 4 bytes an entry.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.contract.native import ROW_MULTIPLE, ScaledOperand
from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.kernels.quantize.triton_ops import element_codes, round_to_grid
from megatron_lowprec.kernels.tuning import fastest

_TILES = {"tensor": 0, "row": 1, "1x128": 2, "128x128": 3}
_BLOCK = 128
_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def encode_scale(
    amax,
    MAX: tl.constexpr,
    FLOOR: tl.constexpr,
    FLOOR_SCALE: tl.constexpr,
    MARGIN_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """``reference.fp32_encode_scale``: FLOOR is the least fp32 not below the floor, FLOOR_SCALE fl32(MAX / floor)."""
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, MAX, tl.float32), amax), _FP32_MAX) * MARGIN_SCALE
    if FLOOR == 0.0:
        scale = tl.where(amax == 0.0, 1.0, scale)
    else:
        scale = tl.where(amax < FLOOR, FLOOR_SCALE * MARGIN_SCALE, scale)
    bits = scale.to(tl.int32, bitcast=True)
    if POWER_OF_TWO:
        bits = bits & 0x7F800000
    finite = (amax.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    return tl.where(finite, bits, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def to_fp8(
    v,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """fp32 -> uint8 codes, nearest even, saturating; NATIVE by the GPU's own conversion."""
    if NATIVE:
        if MANTISSA == 3:
            codes = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        rounded = round_to_grid(v, 0, 0, MANTISSA, MIN_EXPONENT, MAX, 0, 16, True)
        codes = element_codes(rounded, MANTISSA, MIN_EXPONENT, 8, NAN_CODE, v != v).to(tl.uint8)
    return codes


@triton.jit
def amax_along(magnitude, axis: tl.constexpr):
    """Largest along an axis, NaN above all: numbers that are not negative compare as their bits do."""
    return tl.max(magnitude.to(tl.int32, bitcast=True), axis, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def observe(amax_ptr, amax):
    """Raise the fp32 at ``amax_ptr`` to ``amax`` [1, 1]; NaN counts as Inf. Order does not matter to a maximum."""
    bits = tl.minimum(amax.to(tl.int32, bitcast=True), 0x7F800000)
    cell = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tl.zeros([1, 1], tl.int32)
    tl.atomic_max(cell, bits, sem="relaxed")


@triton.jit(do_not_specialize=["M"])
def _amax_kernel(x_ptr, amax_ptr, M, N, stride, VECTORS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """amax of [M, N], or of its M rows and N columns one behind the other; NaN stays the largest."""
    tiles_n = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    rows = (tile // tiles_n) * BM + tl.arange(0, BM)
    cols = (tile % tiles_n) * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    magnitude = tl.abs(x.to(tl.float32))
    cells = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if VECTORS:
        by_row = amax_along(magnitude, 1).to(tl.int32, bitcast=True)
        by_column = amax_along(magnitude, 0).to(tl.int32, bitcast=True)
        tl.atomic_max(cells + rows[:, None], by_row, mask=(rows < M)[:, None], sem="relaxed")
        tl.atomic_max(cells + M + cols[None, :], by_column, mask=(cols < N)[None, :], sem="relaxed")
    else:
        amax = amax_along(amax_along(magnitude, 1), 0).to(tl.int32, bitcast=True)
        tl.atomic_max(cells + tl.zeros([1, 1], tl.int32), amax, sem="relaxed")


@triton.jit(do_not_specialize=["M", "height"])
def _cast_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    observed_ptr,
    sums_ptr,
    M,
    height,
    padded_M,
    N,
    stride,
    ALONG_ROWS: tl.constexpr,
    ALONG_COLUMNS: tl.constexpr,
    OBSERVES: tl.constexpr,
    SUMS: tl.constexpr,
    TILE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    FLOOR: tl.constexpr,
    FLOOR_SCALE: tl.constexpr,
    MARGIN_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SUB: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    tile_m, tile_n = tile // tiles_n, tile % tiles_n
    rows = tile_m * BM + tl.arange(0, BM)
    cols = tile_n * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    magnitude = tl.abs(x)
    if OBSERVES:
        observe(observed_ptr, amax_along(amax_along(magnitude, 1), 0))
    if SUMS:
        tl.store(sums_ptr + tile_m * N + cols, tl.sum(x, axis=0), mask=cols < N)
    # of a row each [BM, 1], or of all [1, 1]
    if TILE == 0:
        row_amax = tl.load(amax_ptr + tl.zeros([1, 1], tl.int32))
    elif TILE == 1:
        row_amax = tl.load(amax_ptr + rows, mask=(rows < M) & ALONG_ROWS, other=0.0)[:, None]
    elif TILE == 2:
        row_amax = amax_along(magnitude, 1)
    else:
        row_amax = amax_along(amax_along(magnitude, 1), 0)
    SHARED: tl.constexpr = TILE == 0 or TILE == 3
    first = tl.full([1, 1], tile == 0, tl.int1)
    if ALONG_ROWS or SHARED:
        scale = encode_scale(row_amax, MAX, FLOOR, FLOOR_SCALE, MARGIN_SCALE, POWER_OF_TWO)
        decode = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    if ALONG_ROWS:
        codes = to_fp8(x * scale, MANTISSA, MIN_EXPONENT, MAX, NAN_CODE, NATIVE)
        out = row_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(
            out + rows.to(tl.int64)[:, None] * N + cols[None, :],
            codes,
            mask=(rows < height)[:, None] & (cols < N)[None, :],
        )
        if TILE == 0:
            tl.store(row_scale_ptr + tl.zeros([1, 1], tl.int32), decode, mask=first)
        elif TILE == 1:
            tl.store(row_scale_ptr + rows[:, None], decode, mask=((rows < M) & (tile_n == 0))[:, None])
        elif TILE == 2:
            tl.store(row_scale_ptr + tile_n * height + rows[:, None], decode, mask=(rows < height)[:, None])
        else:
            pitch = tl.cdiv(tiles_n, 4) * 4
            tl.store(row_scale_ptr + tile_m * pitch + tile_n + tl.zeros([1, 1], tl.int32), decode)
    if ALONG_COLUMNS:
        # Read once more, from the cache, as [GROUP, TALL * SUB] with consecutive rows in a thread: a group's codes then
        # are consecutive bytes of the transposed operand, and what crosses shared memory is bf16, not single bytes.
        GROUP: tl.constexpr = 32
        TALL: tl.constexpr = BM // GROUP
        if SHARED:
            part_scale = tl.sum(tl.sum(scale, 1), 0)  # a number has no layout that the codes could be asked to follow
        for part in tl.static_range(BN // SUB):
            cols = tile_n * BN + part * SUB + tl.arange(0, SUB)
            offsets = rows.to(tl.int64)[:, None] * stride + cols[None, :]
            inside = (rows < M)[:, None] & (cols < N)[None, :]
            if not SHARED:
                if TILE == 1:
                    col_amax = tl.load(amax_ptr + M + cols, mask=cols < N, other=0.0)[None, :]
                else:
                    once = tl.load(x_ptr + offsets, mask=inside, other=0.0)
                    col_amax = amax_along(tl.abs(once.to(tl.float32)), 0)
                column_scale = encode_scale(col_amax, MAX, FLOOR, FLOOR_SCALE, MARGIN_SCALE, POWER_OF_TWO)
                decode = tl.div_rn(tl.full(column_scale.shape, 1.0, tl.float32), column_scale)
                part_scale = tl.reshape(tl.broadcast_to(column_scale, [TALL, SUB]), [1, TALL * SUB])
            # another cache modifier keeps this read apart: the compiler would rearrange the codes instead
            again = tl.load(x_ptr + offsets, mask=inside, other=0.0, cache_modifier=".ca")
            y = tl.permute(tl.reshape(again, [TALL, GROUP, SUB]), (1, 0, 2))
            y = tl.reshape(y, [GROUP, TALL * SUB]).to(tl.float32)
            lane = tl.arange(0, TALL * SUB)
            n = tile_n * BN + part * SUB + lane % SUB
            m = tile_m * BM + (lane // SUB) * GROUP
            codes = to_fp8(y * part_scale, MANTISSA, MIN_EXPONENT, MAX, NAN_CODE, NATIVE)
            out = col_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
            to = (n.to(tl.int64) * padded_M + m)[None, :] + tl.arange(0, GROUP)[:, None]
            inside = (n < N)[None, :] & (m[None, :] + tl.arange(0, GROUP)[:, None] < padded_M)
            tl.store(out + to, codes, mask=inside)
            if TILE == 1:
                tl.store(col_scale_ptr + cols[None, :], decode, mask=((cols < N) & (tile_m == 0))[None, :])
            elif TILE == 2:
                tl.store(col_scale_ptr + tile_m * N + cols[None, :], decode, mask=(cols < N)[None, :])
        if TILE == 0:
            tl.store(col_scale_ptr + tl.zeros([1, 1], tl.int32), decode, mask=first)
        elif TILE == 3:
            pitch = tl.cdiv(tl.cdiv(padded_M, BM), 4) * 4
            tl.store(col_scale_ptr + tile_n * pitch + tile_m + tl.zeros([1, 1], tl.int32), decode)


@dataclass(frozen=True)
class Fp8Rule:
    """How a matrix becomes FP8, as in ``recipe.schema.QuantSpec``; rounded to nearest even, fp32 scales.

    ``tile`` is "tensor", "row", "1x128" or "128x128", its second size along the contracted dimension.
    """

    fmt: Format
    tile: str
    scale_rule: str = "amax"
    amax_floor: float = 0.0
    margin: int = 0
    kernels: dict[tuple[bool, bool, bool, bool], "_CastKernel"] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )


class Fp8Cast(NamedTuple):
    """What one read of [M, N] gave: operands along rows and columns, and fp32 sums over M in parts [parts, N]."""

    rows: ScaledOperand | None
    columns: ScaledOperand | None
    sums: torch.Tensor | None


def amax_of(x: torch.Tensor, vectors: bool) -> torch.Tensor:
    """fp32 [1], or [M + N] of the rows and the columns of x [M, N], row-major; a NaN in reach gives NaN."""
    M, N = x.shape
    amax = torch.zeros(M + N if vectors else 1, dtype=torch.float32, device=x.device)
    kernel = _amax_specialized(vectors)
    programs = -(-M // _AMAX_TILE[0]) * -(-N // _AMAX_TILE[1])
    kernel.launch(programs, x.device, (x, amax, M, N, x.stride(0)), _specialized_on(x))
    return amax


def cast_fp8(
    x: torch.Tensor,
    rule: Fp8Rule,
    *,
    rows: bool,
    columns: bool,
    amax: torch.Tensor | None = None,
    observed: torch.Tensor | None = None,
    sums: bool = False,
) -> Fp8Cast:
    """FP8 operands of x [M, N] along its rows, its columns, or both.

    Args:
        x: bf16 or fp32, the last dimension contiguous; not empty. N a multiple of 16; of 128 along rows in blocks of
            1x128 and for 128x128. M of any size: columns are padded with zeros to whole units of the product.
        amax: of tiles "tensor" [1] and "row" [M + N], from ``amax_of`` or a history; made here where it is None.
        observed: fp32 [1], raised to the amax of x on the way.
        sums: also sum over M, for the gradient of a bias.
    """
    if amax is None and rule.tile in ("tensor", "row"):
        amax = amax_of(x, vectors=rule.tile == "row")
    key = (rows, columns, observed is not None, sums)
    kernel = rule.kernels.get(key)
    if kernel is None:
        kernel = rule.kernels[key] = _CastKernel(rule, *key)
    return kernel.run(x, amax, observed)


@lru_cache(maxsize=2)
def _amax_specialized(vectors: bool) -> Specialized:
    BM, BN = _AMAX_TILE
    return Specialized(_amax_kernel, {"VECTORS": vectors, "BM": BM, "BN": BN}, num_warps=8)


_AMAX_TILE = (32, 512)


def _specialized_on(x: torch.Tensor) -> tuple[object, ...]:
    N, stride = x.shape[1], x.stride(0)
    return x.dtype, x.data_ptr() % 16 == 0, N % 16 == 0, stride % 16 == 0, N == 1, stride == 1


class _Tiling(NamedTuple):
    rows: int
    columns: int
    warps: int
    sub: int  # columns that are transposed at a time


class _CastKernel:
    """The kernel for one rule and set of outputs, in the tiling that is fastest."""

    def __init__(self, rule: Fp8Rule, rows: bool, columns: bool, observes: bool, sums: bool) -> None:
        fmt = rule.fmt
        self._rule, self._rows, self._columns, self._sums = rule, rows, columns, sums
        self._dtype = torch.float8_e4m3fn if fmt.name == "e4m3" else torch.float8_e5m2
        floor = torch.tensor(rule.amax_floor, dtype=torch.float64)
        floor32 = floor.float()
        if floor32 < floor:
            floor32 = torch.nextafter(floor32, torch.tensor(torch.inf))
        constants = {
            "ALONG_ROWS": rows,
            "ALONG_COLUMNS": columns,
            "OBSERVES": observes,
            "SUMS": sums,
            "TILE": _TILES[rule.tile],
            "MANTISSA": fmt.mantissa_bits,
            "MIN_EXPONENT": fmt.min_exponent,
            "MAX": fmt.max,
            "NAN_CODE": 0x7F,
            "FLOOR": float(floor32),
            "FLOOR_SCALE": float((fmt.max / floor).float()) if rule.amax_floor else 1.0,
            "MARGIN_SCALE": 2.0**-rule.margin,
            "POWER_OF_TWO": rule.scale_rule == "amax_pow2",
            "NATIVE": torch.cuda.is_available(),
        }
        if rule.tile in ("1x128", "128x128"):
            shapes = ((8, 128), (4, 128), (8, 64), (4, 64), (4, 32), (16, 128))
            self._tilings = tuple(_Tiling(_BLOCK, _BLOCK, *shape) for shape in shapes)
        else:
            tiles = ((64, 128, 4), (64, 64, 4), (128, 64, 8), (64, 128, 8))
            self._tilings = tuple(_Tiling(rows, columns, warps, columns) for rows, columns, warps in tiles)
        self._name = f"{_cast_kernel.__name__} {constants}"
        self._specialized = {
            tiling: Specialized(
                _cast_kernel,
                constants | {"BM": tiling.rows, "BN": tiling.columns, "SUB": tiling.sub},
                num_warps=tiling.warps,
                # a contracted multiply-add rounds once where the reference rounds twice
                enable_fp_fusion=False,
            )
            for tiling in self._tilings
        }
        self._tiling: _Tiling | None = None

    def run(self, x: torch.Tensor, amax: torch.Tensor | None, observed: torch.Tensor | None) -> Fp8Cast:
        """Allocate and launch; see ``cast_fp8``."""
        (M, N), stride, device = x.shape, x.stride(0), x.device
        multiple = _BLOCK if self._rule.tile in ("1x128", "128x128") else ROW_MULTIPLE
        padded_M = -(-M // multiple) * multiple
        # cuBLAS wants the scales of 1x128 tiles in columns of whole 16 bytes
        height = padded_M if self._rule.tile == "1x128" else M
        by_rows = self._operand(height, N, device, M) if self._rows else None
        by_columns = self._operand(N, padded_M, device, N) if self._columns else None
        parts = None
        specialized_on = (*_specialized_on(x), padded_M == 1)

        def run(tiling: _Tiling) -> None:
            nonlocal parts
            tiles_m = -(-padded_M // tiling.rows)
            if self._sums:
                parts = torch.empty((tiles_m, N), dtype=torch.float32, device=device)
            arguments = (
                x,
                *((x, x) if by_rows is None else (by_rows.elements, by_rows.scale)),
                *((x, x) if by_columns is None else (by_columns.elements, by_columns.scale)),
                x if amax is None else amax,
                x if observed is None else observed,
                x if parts is None else parts,
                M,
                height,
                padded_M,
                N,
                stride,
            )
            self._specialized[tiling].launch(tiles_m * -(-N // tiling.columns), device, arguments, specialized_on)

        if self._tiling is None and x.numel() >= _LARGE_ENOUGH:
            self._tiling = fastest(self._name, self._tilings, run, device)
        run(self._tiling or self._tilings[0])
        return Fp8Cast(by_rows, by_columns, parts)

    def _operand(self, height: int, length: int, device: torch.device, rows: int) -> ScaledOperand:
        return ScaledOperand.empty(height, length, self._dtype, self._rule.tile, device, rows)


_LARGE_ENOUGH = 1 << 24
"""Entries from which an operand tells tilings apart."""
