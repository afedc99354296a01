"""Second stage of sums over rows; the first is fused into the kernels that read the rows.

Each program of such a kernel writes one row of partial sums, which this kernel adds. There are no atomics, so the sum
is deterministic. fp32 [512, 1024] partial sums are 2 MB, which stay in the L2 cache: the launch takes longer than the
reads.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.kernels.planned_launch import Launch, with_warps

_ROWS, _COLUMNS, _WARPS = 64, 32, 4


@triton.jit
def _bias_grad_sum_kernel(partial_ptr, out_ptr, P, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    inside = columns < N
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, P, ROWS):
        row = first + rows
        at = (which * P + row)[:, None] * N + columns[None, :]
        total += tl.load(partial_ptr + at, mask=(row < P)[:, None] & inside[None, :], other=0.0)
    out = tl.sum(total, 0)
    tl.store(out_ptr + which * N + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def sum_partials(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 [k, P, N], contiguous, summed over P and rounded once -> [k, N] of ``dtype``."""
    k, P, N = partial.shape
    out = torch.empty((k, N), dtype=dtype, device=partial.device)
    specialized_on = out.dtype, partial.data_ptr() % 16 == 0, P == 1, P % 16 == 0, N == 1, N % 16 == 0
    _launcher().launch((-(-N // _COLUMNS), k), partial.device, (partial, out, P, N), specialized_on)
    return out


def sum_launch(partial: str, P: Any, N: Any, out: str) -> Launch:
    """``sum_partials`` of one fp32 [P, N], by the names of the tensors, as a launch."""
    arguments = {"partial_ptr": partial, "out_ptr": out, "P": P, "N": N, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    return Launch(with_warps(_bias_grad_sum_kernel, _WARPS), (-(-N // _COLUMNS), 1, 1), arguments)


@cache
def _launcher() -> Specialized:
    return Specialized(_bias_grad_sum_kernel, {"ROWS": _ROWS, "COLUMNS": _COLUMNS}, num_warps=_WARPS)
