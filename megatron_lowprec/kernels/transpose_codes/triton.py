"""Transposes of one-byte codes in one launch, padding included; reads and writes one byte an entry.

A tile is 128 bytes wide in both directions: whole cache lines are read and written, in pieces of 16 bytes if both sizes
are multiples of 16. It crosses shared memory on the way. The addresses of groups are a cached table, as in
``multi_tensor_cast``: weights do not move.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.launch import Specialized, launch, specialized_on
from megatron_lowprec.kernels.multi_tensor_cast.triton import address_table

_TILE = 128
_WARPS = 8  # four 16-byte loads in flight a thread; eight programs fill a multiprocessor of Hopper


@triton.jit
def _transpose_kernel(codes_ptr, out_ptr, R, C, padded, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Write codes [R, C] to ``out_ptr`` [C, padded], a tile each program of axis 0; zeros from column R on.

    GROUPS: ``codes_ptr`` is a table of addresses, int64, one for each program of axis 1.
    """
    out_ptr = out_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    if GROUPS:
        group = tl.program_id(1)
        codes_ptr = tl.multiple_of(tl.load(codes_ptr + group).to(tl.pointer_type(tl.uint8)), 16)
        out_ptr += group.to(tl.int64) * C * padded
    else:
        codes_ptr = codes_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tiles = tl.cdiv(C, TILE)
    rows = (tl.program_id(0) // tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = columns < C
    at = rows[:, None] * C + columns[None, :]
    codes = tl.load(codes_ptr + at, mask=(rows < R)[:, None] & inside[None, :], other=0)
    at = columns[:, None] * padded + rows[None, :]
    tl.store(out_ptr + at, tl.trans(codes), mask=inside[:, None] & (rows < padded)[None, :])


_KERNEL = Specialized(_transpose_kernel, {"GROUPS": False, "TILE": _TILE}, num_warps=_WARPS)


def transpose_codes(codes: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """As ``reference.transpose_codes``; not empty."""
    assert codes.is_contiguous()
    R, C = codes.shape
    padded = -(-R // multiple) * multiple
    out = torch.empty((C, padded), dtype=codes.dtype, device=codes.device)
    arguments = codes, out, R, C, padded
    _KERNEL.launch(_programs(padded, C), codes.device, arguments, specialized_on(arguments))
    return out


def transpose_groups(codes: Sequence[torch.Tensor]) -> torch.Tensor:
    """As ``reference.transpose_groups``; not empty, at addresses that are multiples of 16.

    The first call with new addresses copies their table to the device, so it must not be captured in a CUDA graph.
    """
    R, C = codes[0].shape
    for each in codes:  # the kernel gets only addresses
        assert (each.dtype, each.shape, each.data_ptr() % 16) == (codes[0].dtype, (R, C), 0)
        assert each.is_contiguous()
    out = torch.empty((len(codes), C, R), dtype=codes[0].dtype, device=codes[0].device)
    table = address_table(tuple((each.data_ptr(),) for each in codes), out.device)
    grid = _programs(R, C), len(codes)
    launch(_transpose_kernel, grid, (table, out, R, C, R), {"GROUPS": True, "TILE": _TILE}, num_warps=_WARPS)
    return out


def _programs(R: int, C: int) -> int:
    """One a tile."""
    return triton.cdiv(R, _TILE) * triton.cdiv(C, _TILE)
