"""Amaxes of the operands of a matrix in one read, each behind its own Hadamard transform; bits equal ``reference.py``.

Programs loop over tiles, so that few of them raise the same cell by atomic maxima.
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger, larger_magnitude, raise_to_amax
from megatron_lowprec.kernels.interpreted import INTERPRETED
from megatron_lowprec.kernels.launch import MOST_LAYOUTS, Specialized, specialized_on
from megatron_lowprec.kernels.quantize.rule import CodedMatrix, Direction
from megatron_lowprec.kernels.quantize.triton_ops import groups_in_threads, nvfp4_tile, rounded_to, transformed

_WARPS = 8192
_ABSENT, _PLAIN, _TRANSFORMED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["scale_ptr", "tensor_scale_ptr"])
def _operand_amaxes_kernel(
    x_ptr,
    amax_ptr,
    row_signs_ptr,
    col_signs_ptr,
    scale_ptr,
    tensor_scale_ptr,
    M,
    N,
    stride,
    CODED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROUNDS: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Raises two cells: of the operand along rows, and of that along columns."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    tl.static_assert(BM == GROUP or COLUMNS != _TRANSFORMED)
    P: tl.constexpr = BM * BN // GROUP
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * tiles_n
    PAIRS: tl.constexpr = tl.bfloat16 == DTYPE and not INTERPRETED
    # entry by entry: a reduction of each tile would cross lanes and warps
    plain = tl.zeros([BM, BN], DTYPE if PAIRS else tl.float32)
    of_rows = tl.zeros([1, P], tl.float32)
    of_columns = tl.zeros([1, BN], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile // tiles_n) * BM + tl.arange(0, BM)
        cols = (tile % tiles_n) * BN + tl.arange(0, BN)
        offsets = rows.to(tl.int64)[:, None] * stride + cols[None, :]
        if CODED:
            x = nvfp4_tile(x_ptr, scale_ptr, tensor_scale_ptr, rows, (tile % tiles_n) * BN, M, N, BN)
        else:
            x = tl.load(x_ptr + offsets, mask=(rows < M)[:, None] & (cols < N)[None, :], other=0.0)
        if ROWS == _PLAIN or COLUMNS == _PLAIN:
            plain = larger_magnitude(plain, x) if PAIRS else larger(plain, tl.abs(x.to(tl.float32)))
        if ROWS == _TRANSFORMED:
            y = tl.trans(tl.reshape(x, [P, GROUP])).to(tl.float32)
            of_rows = larger(of_rows, amax_along(tl.abs(transformed(y, row_signs_ptr, GROUP, False, DTYPE)), 0))
        if COLUMNS == _TRANSFORMED:
            y = groups_in_threads(x) if GROUP >= 128 else x.to(tl.float32)
            of_columns = larger(of_columns, amax_along(tl.abs(transformed(y, col_signs_ptr, GROUP, False, DTYPE)), 0))
    if ROUNDS:  # a larger entry is not rounded to a smaller one
        of_rows, of_columns = rounded_to(of_rows, DTYPE), rounded_to(of_columns, DTYPE)
    plain = plain.to(tl.float32)
    if ROWS != _ABSENT:
        raise_to_amax(amax_ptr, plain if ROWS == _PLAIN else of_rows)
    if COLUMNS != _ABSENT:
        raise_to_amax(amax_ptr + 1, plain if COLUMNS == _PLAIN else of_columns)


class _Launch(NamedTuple):
    """A kernel of ``operand_amaxes`` for matrices of one layout; its last two fields as for ``Specialized.launch``."""

    kernel: Specialized
    programs: int
    specialized_on: Hashable


@lru_cache(maxsize=64)
def _specialized(
    rows: int, columns: int, rounds: bool, group: int, coded: bool = False
) -> tuple[Specialized, int, int, int]:
    """The kernel, rows and columns of its tile, and warps."""
    if group >= 128:  # a group fills a thread's registers, and one warp exchanges it without barriers
        height, width, warps = (group, 32, 1) if columns == _TRANSFORMED.value else (32, group, 1)
    else:
        height, width, warps = group, max(4096 // group, group), 4
    constants = {"CODED": coded, "ROWS": rows, "COLUMNS": columns, "ROUNDS": rounds, "GROUP": group}
    constants |= {"BM": height, "BN": width}
    # a contracted multiply-add rounds once, the reference twice
    kernel = Specialized(_operand_amaxes_kernel, constants, num_warps=warps, enable_fp_fusion=False)
    return kernel, height, width, warps


@lru_cache(maxsize=MOST_LAYOUTS)
def _launches(
    shape: tuple[int, int],
    stride: int,
    dtype: torch.dtype,
    aligned: bool,
    blocks: tuple[int | None, int | None],
    rounds: bool,
    coded: bool,
) -> list[_Launch]:
    """``blocks``: of the transforms, 0 without one, None where no amax is asked for."""
    M, N = shape
    kinds = [_ABSENT if each is None else _TRANSFORMED if each else _PLAIN for each in blocks]
    of_rows, of_columns = (kind.value for kind in kinds)
    group = blocks[0] or blocks[1] or 16
    # bound by arithmetic: two kernels with one group in registers each beat one kernel that reads less
    apart, found = group >= 128 and None not in blocks, []
    for ways in ((of_rows, 0), (0, of_columns)) if apart else ((of_rows, of_columns),):
        entries = group if _TRANSFORMED.value in ways else 16
        kernel, height, width, warps = _specialized(*ways, rounds, entries, coded)
        programs = min(_WARPS // warps, -(-M // height) * -(-N // width))
        found.append(_Launch(kernel, programs, (dtype, aligned, specialized_on((M, N, stride)))))
    return found


def operand_amaxes(
    x: torch.Tensor | CodedMatrix,
    *,
    rows: Direction | None,
    columns: Direction | None,
    rounds_transform: bool = False,
) -> torch.Tensor:
    """As the reference, also of a ``CodedMatrix``."""
    coded = isinstance(x, CodedMatrix)
    read, *scales = x if isinstance(x, CodedMatrix) else (x, x, x)
    shape, stride, device = x.shape, read.stride(0), read.device
    amaxes = torch.zeros(2, dtype=torch.float32, device=device)
    signs = rows and rows.signs, columns and columns.signs
    blocks = tuple(
        [way and (0 if each is None else each.numel()) for way, each in zip((rows, columns), signs, strict=True)]
    )
    arguments = (read, amaxes, *[read if each is None else each for each in signs], *scales, *shape, stride)
    aligned = read.data_ptr() % 16 == 0
    for launch in _launches(shape, stride, read.dtype, aligned, blocks, rounds_transform, coded):
        launch.kernel.launch(launch.programs, device, arguments, launch.specialized_on)
    return amaxes
