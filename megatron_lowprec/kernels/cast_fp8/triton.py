"""Rowwise and columnwise FP8 data of a matrix from one read, and its amax; bits equal to ``reference.py``.

The codes are those of ``kernels.quantize.reference.quantize_operand``. A matrix [M, N] gives rowwise codes [M, N] and
columnwise codes [N, M padded]. Both have the contracted dimension last, as Hopper's FP8 GEMMs require. Reading bf16
and writing both moves 4 bytes an entry. A ``CastPrologue`` computes the matrix in the kernel, so the output of a norm
or an activation is never in memory.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, raise_to_amax
from megatron_lowprec.kernels.bias_grad.triton import sum_partials
from megatron_lowprec.kernels.cast_fp8.prologue import KINDS, CastPrologue, Kind, Matrix, prologue_of
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Cast, Fp8Rule
from megatron_lowprec.kernels.cast_fp8.tiles import cast_rows, cast_words
from megatron_lowprec.kernels.cast_fp8.triton_ops import BLOCK_128X128, TENSOR
from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.kernels.tuning import Tuned

_BLOCK = 128


@triton.jit(do_not_specialize=["M"])
def _amax_kernel(x_ptr, amax_ptr, M, N, stride, VECTORS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Amax of [M, N], or of its M rows followed by its N columns; NaN compares as the largest."""
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
        raise_to_amax(amax_ptr, magnitude)


@triton.jit(do_not_specialize=["threshold", "M", "height"])
def _cast_kernel(
    x_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
    threshold,
    keep_scale,
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
    CAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    source = (x_ptr, second_ptr, third_ptr, fourth_ptr, threshold, keep_scale)
    tiles_n = tl.cdiv(N, BN)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
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


def amax_of(x: torch.Tensor | CastPrologue, vectors: bool) -> torch.Tensor:
    """Amax of x [M, N], row-major, fp32 [1], or with ``vectors`` of each row and column, [M + N]; NaN propagates.

    Args:
        x: a matrix in memory; several tensors only without ``vectors``.
    """
    parts = (x,) if isinstance(x, torch.Tensor) else x.in_memory
    assert len(parts) == 1 or (parts and not vectors), "no amax of these tensors in one pass"
    amax = torch.zeros(sum(x.shape) if vectors else 1, dtype=torch.float32, device=parts[0].device)
    kernel = _amax_specialized(vectors)
    for part in parts:
        M, N = part.shape
        programs = -(-M // _AMAX_TILE[0]) * -(-N // _AMAX_TILE[1])
        arguments = part, amax, M, N, part.stride(0)
        kernel.launch(programs, part.device, arguments, Matrix(part).specialized_on())
    return amax


def cast_fp8(
    x: torch.Tensor | CastPrologue,
    rule: Fp8Rule,
    *,
    rowwise: bool,
    columnwise: bool,
    amax: torch.Tensor | None = None,
    observed: torch.Tensor | None = None,
    sums: bool = False,
) -> Fp8Cast:
    """Rowwise data, columnwise data or both of x [M, N] in FP8, from one read.

    Args:
        x: bf16 or fp32, last dimension contiguous, not empty. N a multiple of 16; of 128 for rowwise 1x128 blocks and
            for 128x128 blocks. Any M: columns are zero-padded to the GEMM's multiple.
        amax: fp32 [1] for granularity "tensor", [M + N] for "row", from ``amax_of`` or a history; None computes it.
        observed: fp32 [1], raised to the amax of x, NaN as Inf.
        sums: also sum over M, for the gradient of a bias; for a computed source before rounding its entries.
    """
    source = prologue_of(x)
    first = x if isinstance(x, torch.Tensor) else x.x
    if amax is None and rule.granularity in ("tensor", "row"):
        amax = amax_of(source, vectors=rule.granularity == "row")
    key = (rowwise, columnwise, observed is not None, sums, source.kind, source.head_widths)
    kernel = rule.kernels.get(key)
    shape, device = first.shape if first is x else source.shape, first.device
    M, N = shape
    if kernel is None:
        kernel = rule.kernels[key] = _CastKernel(rule, device, *key)
    made, partials = rule.empty(shape, device, rowwise=rowwise, columnwise=columnwise), None
    height, padded_M = rule.padded_rows(M)
    if sums:
        partials = torch.empty((1, -(-padded_M // kernel.tilings[0].rows), N), dtype=torch.float32, device=device)
    # placeholders for absent tensors, which the kernel does not access
    arguments = (
        *source.arguments(),
        *(made[:4] if rowwise and columnwise else [first if tensor is None else tensor for tensor in made[:4]]),
        first if amax is None else amax,
        first if observed is None else observed,
        first if partials is None else partials,
        M,
        height,
        padded_M,
        N,
        first.stride(0),
    )
    specialized_on = (*source.specialized_on(), padded_M == 1)

    def launch(tiling: _Tiling) -> None:
        specialized, programs = kernel.at(tiling, M, padded_M, N)
        specialized.launch(programs, device, arguments, specialized_on)

    tiling = kernel.tilings[0]
    if not sums:
        tiling = kernel.tuned.choose(M * N, launch, device, below=(M * N).bit_length())
    specialized, programs = kernel.at(tiling, M, padded_M, N)
    specialized.launch(programs, device, arguments, specialized_on)
    return made if partials is None else made._replace(sums=sum_partials(partials, first.dtype)[0])


@lru_cache(maxsize=2)
def _amax_specialized(vectors: bool) -> Specialized:
    BM, BN = _AMAX_TILE
    return Specialized(_amax_kernel, {"VECTORS": vectors, "BM": BM, "BN": BN}, num_warps=8)


_AMAX_TILE = (32, 512)


class _Tiling(NamedTuple):
    rows: int
    columns: int
    warps: int
    part_rows: int = 0  # rows at a time if each has its own scale; 0 for all
    part_columns: int = 0  # columns at a time if each has its own scale, or the matrix has one; 0 for all


class _CastKernel:
    """The kernel for one rule and set of outputs; ``tuned`` selects a tiling for each power of two of sizes.

    Sums always use the first tiling: the tiling fixes their order and so their last bits, and tensor-parallel ranks
    with copies of a bias must update it equally.
    """

    def __init__(
        self,
        rule: Fp8Rule,
        device: torch.device,
        rows: bool,
        columns: bool,
        observes: bool,
        sums: bool,
        kind: Kind,
        widths: tuple[int, int] = (0, 0),
    ) -> None:
        self._parts = 2 if kind == "swiglu_grad" else 1  # the gate's columns and those of ``up`` share no tile
        self._constants = rule.constants(rows, columns, observes, sums, KINDS[kind], widths, device)
        if rule.granularity == "1x128":
            B = _BLOCK
            shapes = {
                (True, True): (
                    (B, B, 2, 32, 32),
                    (B, B, 4, 64, 64),
                    (B, B, 4, 64, 32),
                    (B, B, 8, 64, 64),
                ),
                (True, False): ((64, B, 4), (32, B, 4), (B, B, 8)),
                (False, True): ((B, 64, 4), (B, 32, 4), (B, 64, 8)),
            }[rows, columns]
        elif rule.granularity == "128x128":
            shapes = ((_BLOCK, _BLOCK, 8), (_BLOCK, _BLOCK, 4))
        else:
            shapes = ((64, 64, 4), (64, 128, 4), (128, 64, 8), (64, 128, 8), (128, 128, 8))
            if rule.granularity == "tensor":
                # Sequential parts share the scale and one reduction of the observed amax: half the instructions of a
                # cast from memory. Too few programs for a small matrix.
                shapes += ((64, 256, 4, 0, 128), (64, 512, 4, 0, 128), (128, 256, 8, 0, 128))
        self.tilings = tuple(_Tiling(*shape) for shape in shapes)
        self.tuned = Tuned(f"{_cast_kernel.__name__} {self._constants._asdict()}", self.tilings)
        self._specialized: dict[tuple[_Tiling, bool], Specialized] = {}

    def at(self, tiling: _Tiling, M: int, padded_M: int, N: int) -> tuple[Specialized, int]:
        """The kernel specialized for a tiling, and the number of programs that cover [M, N]."""
        programs = -(-padded_M // tiling.rows) * -(-N // tiling.columns)
        whole = padded_M == M and M % tiling.rows == 0 and N % (tiling.columns * self._parts) == 0
        return self._specialized.get((tiling, whole)) or self._specialize(tiling, whole), programs

    def _specialize(self, tiling: _Tiling, whole: bool) -> Specialized:
        kernel = Specialized(
            _cast_kernel,
            {
                "CAST": self._constants._replace(WHOLE=whole),
                "BM": tiling.rows,
                "BN": tiling.columns,
                "ROWS": tiling.part_rows or tiling.rows,
                "COLUMNS": tiling.part_columns or tiling.columns,
            },
            num_warps=tiling.warps,
            # a contracted multiply-add rounds once, the reference twice
            enable_fp_fusion=False,
        )
        self._specialized[tiling, whole] = kernel
        return kernel
