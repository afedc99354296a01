"""Block amaxes and FP8 codes of flat shards: one launch for all matrices, with bits equal to ``reference.py``.

A program handles one block and the shard's entries in it, so a block's amax needs no atomics. The grid is (block,
matrix), over the rows of blocks that the shard meets. The amax reads 4 bytes an entry; the cast reads 4 and writes 1.
Addresses are in a table in device memory, as in ``multi_tensor_cast``.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.amax.triton_ops import amax_along
from megatron_lowprec.kernels.cast_fp8.rule import code_constants
from megatron_lowprec.kernels.cast_fp8.triton_ops import to_fp8
from megatron_lowprec.kernels.multi_tensor_cast.triton import address_table
from megatron_lowprec.kernels.partial_cast.reference import Shard

_ALIGNMENT = 16  # of addresses in bytes, starts, entry counts and columns, for vector loads and stores
_COLUMNS = tl.constexpr(6)  # of the table: addresses of values and codes; start; entries; columns; first block


@triton.jit
def _place(table_ptr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The program's block: addresses of values and codes of its row of blocks, int32 indices [BM, BN] from these with
    their mask, the block's index among those of all matrices, and whether the shard reaches the row of blocks.
    """
    row = table_ptr + _COLUMNS * tl.program_id(1)
    values = tl.load(row).to(tl.pointer_type(tl.float32))
    codes = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    start, count, columns = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    if ALIGNED:
        values, codes = tl.multiple_of(values, 16), tl.multiple_of(codes, 16)
        start, count, columns = tl.multiple_of(start, 16), tl.multiple_of(count, 16), tl.multiple_of(columns, 16)
    across = tl.cdiv(columns, BN)
    down = start // columns // BM + tl.program_id(0) // across
    first = down * BM * columns - start  # of the row of blocks, counted from the shard's first entry
    low = tl.minimum(tl.maximum(-first, 0), BM * columns).to(tl.int32)
    high = tl.minimum(tl.maximum(count - first, 0), BM * columns).to(tl.int32)
    column = (tl.program_id(0) % across * BN).to(tl.int32) + tl.arange(0, BN)[None, :]
    at = tl.arange(0, BM)[:, None] * columns.to(tl.int32) + column
    inside = (column < columns) & (at >= low) & (at < high)
    index = tl.load(row + 5) + down * across + tl.program_id(0) % across
    return values + first, codes + first, at, inside, index, high > 0


@triton.jit
def _partial_amax_kernel(table_ptr, amax_ptr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    values, _, at, inside, index, reached = _place(table_ptr, ALIGNED, BM, BN)
    magnitude = tl.abs(tl.load(values + at, mask=inside, other=0.0))
    amax = amax_along(amax_along(magnitude, 1), 0)
    tl.store(amax_ptr + index + tl.zeros([1, 1], tl.int32), amax, mask=reached)


@triton.jit
def _partial_cast_kernel(
    table_ptr, scale_ptr, ALIGNED: tl.constexpr, CODES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    values, codes, at, inside, index, reached = _place(table_ptr, ALIGNED, BM, BN)
    scale = tl.load(scale_ptr + index, mask=reached, other=1.0)
    value = tl.load(values + at, mask=inside, other=0.0)
    tl.store(codes + at, to_fp8(value * scale, CODES), mask=inside)


def partial_amax(shards: Sequence[Shard], block: tuple[int, int]) -> torch.Tensor:
    """As ``reference.partial_amax``, bit for bit; sizes of a block are powers of two."""
    blocks = sum(down * across for down, across in (shard.blocks(block) for shard in shards))
    amax = torch.zeros(blocks, dtype=torch.float32, device=shards[0].values.device)
    _launch(_partial_amax_kernel, shards, None, block, amax)
    return amax


def partial_cast_(
    shards: Sequence[Shard],
    encode_scale: torch.Tensor,
    fmt: Format,
    block: tuple[int, int],
    codes: Sequence[torch.Tensor],
) -> None:
    """As ``reference.partial_cast_``, bit for bit, except that a NaN's code is positive."""
    constants = code_constants(fmt, encode_scale.device)
    _launch(_partial_cast_kernel, shards, codes, block, encode_scale.contiguous(), CODES=constants)


def _launch(
    kernel: triton.JITFunction,
    shards: Sequence[Shard],
    codes: Sequence[torch.Tensor] | None,
    block: tuple[int, int],
    numbers: torch.Tensor,
    **constants: object,
) -> None:
    """Run ``kernel`` over the blocks that the shards meet; ``numbers``, fp32, has one entry a block."""
    rows, first, programs = [], 0, 0
    for i, shard in enumerate(shards):  # the kernel gets only addresses
        values, start, (_, columns) = shard
        code = None if codes is None else codes[i]
        assert values.dtype == torch.float32
        assert values.is_contiguous()
        assert code is None or (code.dtype, code.numel()) == (torch.uint8, values.numel())
        assert code is None or code.is_contiguous()
        count, (down, across) = values.numel(), shard.blocks(block)
        if count:
            address = 0 if code is None else code.data_ptr()
            rows.append((values.data_ptr(), address, start, count, columns, first))
            met = (start + count - 1) // columns // block[0] - start // columns // block[0] + 1
            programs = max(programs, met * across)
        first += down * across
    if not rows:
        return
    kernel[programs, len(rows)](
        address_table(tuple(rows), numbers.device),
        numbers,
        ALIGNED=all(number % _ALIGNMENT == 0 for row in rows for number in row[:5]),
        BM=block[0],
        BN=block[1],
        num_warps=8,
        **constants,
    )
