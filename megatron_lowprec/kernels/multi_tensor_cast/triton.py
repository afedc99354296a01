"""FP8 codes of many tensors in one launch, where torch launches four a tensor; reads 4 bytes an entry and writes 1.

The tensors' addresses are a table in device memory. It is cached, since an optimizer's main weights and the buffer of
their codes do not move. Making a table waits for the device, so tensors at ever new addresses cost a wait each. The
grid is (part, tensor); the programs of a tensor stride over its blocks.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.cast_fp8.rule import code_constants
from megatron_lowprec.kernels.cast_fp8.triton_ops import to_fp8

_BLOCK, _MOST_PARTS = 4096, 256
_ALIGNMENT = 16  # of addresses in bytes, and of entry counts, for vector loads and stores


@triton.jit
def _multi_tensor_cast_kernel(
    table_ptr,
    scale_ptr,
    ALIGNED: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.program_id(1)
    values = tl.load(table_ptr + 3 * tensor).to(tl.pointer_type(tl.float32))
    codes = tl.load(table_ptr + 3 * tensor + 1).to(tl.pointer_type(tl.uint8))
    count = tl.load(table_ptr + 3 * tensor + 2)
    if ALIGNED:
        values, codes, count = tl.multiple_of(values, 16), tl.multiple_of(codes, 16), tl.multiple_of(count, 16)
    scale = tl.load(scale_ptr + tensor)
    for block in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = block + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=0.0)
        tl.store(codes + at, to_fp8(value * scale, CODES), mask=at < count)


@lru_cache(maxsize=16384)  # above the casts of a step, one a weight: with fewer entries each lookup would miss
def address_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """The rows as int64 [tensors, columns] on ``device``; a row that was not used before costs a wait."""
    return torch.tensor(rows, dtype=torch.int64, device=device)


def multi_tensor_cast_(
    values: Sequence[torch.Tensor], encode_scale: torch.Tensor, fmt: Format, codes: Sequence[torch.Tensor]
) -> None:
    """As ``reference.multi_tensor_cast_``, bit for bit, except that a NaN's code is positive."""
    for value, code in zip(values, codes, strict=True):  # the kernel gets only addresses
        assert (value.dtype, code.dtype, value.numel()) == (torch.float32, torch.uint8, code.numel())
        assert value.is_contiguous()
        assert code.is_contiguous()
    rows = tuple((value.data_ptr(), code.data_ptr(), value.numel()) for value, code in zip(values, codes, strict=True))
    largest = max((count for *_, count in rows), default=0)
    if largest == 0:
        return
    device = encode_scale.device
    _multi_tensor_cast_kernel[min(_MOST_PARTS, triton.cdiv(largest, _BLOCK)), len(rows)](
        address_table(rows, device),
        encode_scale.contiguous(),
        ALIGNED=all(number % _ALIGNMENT == 0 for row in rows for number in row),
        CODES=code_constants(fmt, device),
        BLOCK=_BLOCK,
        num_warps=8,
    )
