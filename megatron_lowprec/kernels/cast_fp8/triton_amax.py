"""Amaxes of a matrix in one read: of the whole, or of each row and each column."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger, larger_magnitude, raise_to_amax
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue, specialized_on_matrix
from megatron_lowprec.kernels.interpreted import INTERPRETED
from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.kernels.planned_launch import Launch, with_warps


@triton.jit(do_not_specialize=["M"])
def _amax_kernel(x_ptr, amax_ptr, M, N, stride, BM: tl.constexpr, BN: tl.constexpr):
    """Amax of [M, N]; NaN compares as the largest."""
    tiles_n = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    rows = (tile // tiles_n) * BM + tl.arange(0, BM)
    cols = (tile % tiles_n) * BN + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    raise_to_amax(amax_ptr, tl.abs(x.to(tl.float32)))


@triton.jit(do_not_specialize=["M"])
def _vector_amaxes_kernel(x_ptr, amax_ptr, M, N, stride, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Amaxes of the M rows of [M, N], then of its N columns; NaN compares as the largest.

    A program takes ``TILES`` tiles, one below the other, and its columns once: the cells of columns lie in a few cache
    lines, at which atomic maxima of every tile would wait for each other.
    """
    PAIRS: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not INTERPRETED
    tiles_n = tl.cdiv(N, BN)
    first = (tl.program_id(0) // tiles_n) * (TILES * BM)
    cols = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    cells = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    largest = tl.zeros([BM, BN], tl.bfloat16 if PAIRS else tl.float32)
    for tile in range(TILES):
        rows = first + tile * BM + tl.arange(0, BM)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)
        magnitude = tl.abs(x.to(tl.float32))
        by_row = amax_along(magnitude, 1).to(tl.int32, bitcast=True)
        tl.atomic_max(cells + rows[:, None], by_row, mask=(rows < M)[:, None], sem="relaxed")
        largest = larger_magnitude(largest, x) if PAIRS else larger(largest, magnitude)
    by_column = amax_along(largest.to(tl.float32), 0).to(tl.int32, bitcast=True)
    tl.atomic_max(cells + M + cols[None, :], by_column, mask=(cols < N)[None, :], sem="relaxed")


def amax_of(x: torch.Tensor | CastPrologue, vectors: bool) -> torch.Tensor:
    """Amax of x [M, N], row-major, fp32 [1], or with ``vectors`` of each row and column, [M + N]; NaN propagates.

    Args:
        x: a matrix in memory; several tensors only without ``vectors``.
    """
    parts: tuple[torch.Tensor, ...] = (x,) if isinstance(x, torch.Tensor) else x.in_memory
    assert len(parts) == 1 or (parts and not vectors), "no amax of these tensors in one pass"
    amax = torch.zeros(sum(x.shape) if vectors else 1, dtype=torch.float32, device=parts[0].device)
    kernel = _specialized(vectors)
    for part in parts:
        (M, N), tiling = part.shape, _TILINGS[vectors]
        kernel.launch(
            tiling.programs(M, N), part.device, (part, amax, M, N, part.stride(0)), specialized_on_matrix(part)
        )
    return amax


def vector_amaxes_launch(x: torch.Tensor) -> Launch:
    """The launch of ``amax_of(x, vectors=True)`` for a compiler; tensors "x" and "amax".

    Args:
        x: without data; its rows may be symbolic.
    """
    (M, N), tiling = x.shape, _TILINGS[True]
    sizes = {"M": M, "N": N, "stride": x.stride(0)}
    kernel = with_warps(_vector_amaxes_kernel, tiling.warps)
    return Launch(
        kernel, (tiling.programs(M, N), 1, 1), {"x_ptr": "x", "amax_ptr": "amax", **sizes, **tiling.constants}
    )


def source_of_vector_amaxes() -> str:
    """Digest of the kernel of ``vector_amaxes_launch``."""
    key: str = _vector_amaxes_kernel.cache_key
    return key


class _Tiling(NamedTuple):
    rows: int
    columns: int
    warps: int
    tiles: int = 0  # of a program, one below the other; 0: one amax of the matrix

    @property
    def constants(self) -> dict[str, int]:
        """The constexpr parameters."""
        return ({"TILES": self.tiles} if self.tiles else {}) | {"BM": self.rows, "BN": self.columns}

    def programs(self, M: Any, N: Any) -> Any:
        """Their number for [M, N], integers or symbols."""
        return -(-M // (self.rows * max(self.tiles, 1))) * -(-N // self.columns)


# of vectors: the fastest of 13 on an H200 for [8192, 14336], within 10% of it for smaller matrices
_TILINGS = {False: _Tiling(32, 512, 8), True: _Tiling(64, 128, 4, 8)}


@lru_cache(maxsize=2)
def _specialized(vectors: bool) -> Specialized:
    kernel = _vector_amaxes_kernel if vectors else _amax_kernel
    return Specialized(kernel, _TILINGS[vectors].constants, num_warps=_TILINGS[vectors].warps)
