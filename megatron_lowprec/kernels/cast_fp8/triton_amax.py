"""Amaxes of a matrix in one read: of the whole, or of each row and each column."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger, larger_magnitude, raise_to_amax
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue, specialized_on_matrix
from megatron_lowprec.kernels.interpreted import INTERPRETED
from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.kernels.planned_launch import Launch, with_warps


@triton.jit(do_not_specialize=["M"])
def _amax_kernel(
    x_ptr, amax_ptr, M, N, stride, VECTORS: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Amax of [M, N], or of its M rows followed by its N columns; NaN compares as the largest.

    A program takes ``TILES`` tiles, one below the other, and raises the cells of its columns once: they lie in a few
    cache lines, at which atomic maxima of every tile would wait for each other.
    """
    PAIRS: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not INTERPRETED
    tiles_n = tl.cdiv(N, BN)
    first = (tl.program_id(0) // tiles_n) * (TILES * BM)
    cols = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    cells = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    largest = tl.zeros([BM, BN], tl.bfloat16 if PAIRS else tl.float32)
    for tile in range(tl.minimum(tl.cdiv(M - first, BM), TILES)):
        rows = first + tile * BM + tl.arange(0, BM)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)
        magnitude = tl.abs(x.to(tl.float32))
        if VECTORS:
            by_row = amax_along(magnitude, 1).to(tl.int32, bitcast=True)
            tl.atomic_max(cells + rows[:, None], by_row, mask=(rows < M)[:, None], sem="relaxed")
        largest = larger_magnitude(largest, x) if PAIRS else larger(largest, magnitude)
    if VECTORS:
        by_column = amax_along(largest.to(tl.float32), 0).to(tl.int32, bitcast=True)
        tl.atomic_max(cells + M + cols[None, :], by_column, mask=(cols < N)[None, :], sem="relaxed")
    else:
        raise_to_amax(amax_ptr, largest.to(tl.float32))


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
        (M, N), (rows, columns) = part.shape, _OF_A_PROGRAM
        arguments = part, amax, M, N, part.stride(0)
        kernel.launch(-(-M // rows) * -(-N // columns), part.device, arguments, specialized_on_matrix(part))
    return amax


def vector_amaxes_launch(x: torch.Tensor) -> Launch:
    """The launch of ``amax_of(x, vectors=True)`` for a compiler; tensors "x" and "amax".

    Args:
        x: without data; its rows may be symbolic.
    """
    (M, N), (rows, columns) = x.shape, _OF_A_PROGRAM
    sizes = {"M": M, "N": N, "stride": x.stride(0)}
    arguments = {"x_ptr": "x", "amax_ptr": "amax", **sizes, "VECTORS": True, **_TILING}
    return Launch(with_warps(_amax_kernel, _WARPS), (-(-M // rows) * -(-N // columns), 1, 1), arguments)


def source_of_vector_amaxes() -> str:
    """Digest of the kernel of ``vector_amaxes_launch``."""
    key: str = _amax_kernel.cache_key
    return key


# the fastest of 13 for vectors of [8192, 14336] on an H200, within 10% of it for smaller matrices
_TILING, _WARPS = {"TILES": 8, "BM": 64, "BN": 128}, 4
_OF_A_PROGRAM = _TILING["TILES"] * _TILING["BM"], _TILING["BN"]


@lru_cache(maxsize=2)
def _specialized(vectors: bool) -> Specialized:
    return Specialized(_amax_kernel, {"VECTORS": vectors, **_TILING}, num_warps=_WARPS)
