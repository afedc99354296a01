"""Bias, dropout and residual in one forward pass, and one backward pass that also sums the bias gradient.

Bytes an entry in bf16: forward 6, backward 4 (2 without dropout, when dx is dout and only the sum is computed). A
kernel that stores its mask moves 7 and 5, and 3 more for the sum. For [32768, 1024] at 4.2 TB/s: 48 and 32
microseconds. Random bits cost one eighth of a Philox call an entry, as in kernels/quantize.
"""

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import larger, raise_to_amax
from megatron_lowprec.kernels.bias_grad.triton import sum_partials
from megatron_lowprec.kernels.dropout import reference
from megatron_lowprec.kernels.philox.triton import philox

_COLUMNS, _WARPS = 1024, 4
_FORWARD_ROWS, _BACKWARD_ROWS = 4, 2
_BACKWARD_PROGRAMS = 1024  # all run at once: eight on each of 128 multiprocessors


@triton.jit
def factors(rows, first_column, key_ptr, threshold, scale, COLUMNS: tl.constexpr):
    """fp32 [R, COLUMNS]: 0 for dropped entries, else scale; rows int32 [R], first_column a multiple of 8."""
    ROWS: tl.constexpr = rows.shape[0]
    k0 = tl.load(key_ptr).to(tl.uint32, bitcast=True)
    k1 = tl.load(key_ptr + 1).to(tl.uint32, bitcast=True)
    call = (first_column // 8 + tl.arange(0, COLUMNS // 8)).to(tl.uint32)[None, :]
    rng_step = tl.zeros([1, 1], tl.uint32)
    w0, w1, w2, w3 = philox(call, rows.to(tl.uint32)[:, None], rng_step, rng_step, k0, k1)
    # entry 4 b2 + 2 b1 + b0 takes word 2 b2 + b1, half b0: the bits are joined from the top down
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    draws = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [ROWS, COLUMNS]).to(tl.int32)
    return tl.where(draws < threshold, 0.0, scale)


@triton.jit
def _dropout_forward_kernel(
    x_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    key_ptr,
    T,
    H,
    threshold,
    scale,
    BIAS: tl.constexpr,
    DROPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_column = tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    inside = (rows < T)[:, None] & (columns < H)[None, :]
    at = rows.to(tl.int64)[:, None] * H + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
    if DROPS:
        x *= factors(rows, first_column, key_ptr, threshold, scale, COLUMNS)
    tl.store(out_ptr + at, (residual + x).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dropout_backward_kernel(
    dout_ptr,
    dx_ptr,
    partial_ptr,
    amax_ptr,
    key_ptr,
    T,
    H,
    rows_a_program,
    threshold,
    scale,
    BIAS: tl.constexpr,
    DROPS: tl.constexpr,
    OBSERVES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    first_column = tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    within = columns < H
    dbias = tl.zeros([COLUMNS], tl.float32)
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = tl.program_id(0) * rows_a_program
    for start in tl.range(0, rows_a_program, ROWS, num_stages=STAGES):
        rows = first + start + tl.arange(0, ROWS)
        inside = (rows < T)[:, None] & within[None, :]
        at = rows.to(tl.int64)[:, None] * H + columns[None, :]
        dx = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if DROPS:
            dx *= factors(rows, first_column, key_ptr, threshold, scale, COLUMNS)
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if BIAS:
            dbias += tl.sum(dx, 0)
        if OBSERVES:
            largest = larger(largest, tl.abs(dx.to(dx_ptr.dtype.element_ty).to(tl.float32)))
    if BIAS:
        tl.store(partial_ptr + tl.program_id(0) * H + columns, dbias, mask=within)
    if OBSERVES:
        raise_to_amax(amax_ptr, largest)


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float, key: torch.Tensor | None
) -> torch.Tensor:
    """As ``reference.bias_dropout_add``; x and residual contiguous."""
    T, H = x.shape
    out = torch.empty_like(x)
    _dropout_forward_kernel[(triton.cdiv(T, _FORWARD_ROWS), triton.cdiv(H, _COLUMNS))](
        x,
        x if bias is None else bias,
        residual,
        out,
        x if key is None else key,
        T,
        H,
        reference.threshold(p),
        reference.keep_scale(p),
        BIAS=bias is not None,
        DROPS=reference.threshold(p) > 0,
        ROWS=_FORWARD_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return out


def bias_dropout_add_backward(
    dout: torch.Tensor,
    p: float,
    key: torch.Tensor | None,
    bias_dtype: torch.dtype | None,
    amax: torch.Tensor | None = None,
    *,
    stages: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``reference.bias_dropout_add_backward``; dout contiguous, and returned as dx without dropout."""
    T, H = dout.shape
    drops = reference.threshold(p) > 0
    if not drops and bias_dtype is None and amax is None:
        return dout, None
    across = triton.cdiv(H, _COLUMNS)
    rows = triton.cdiv(triton.cdiv(T, max(1, _BACKWARD_PROGRAMS // across)), _BACKWARD_ROWS) * _BACKWARD_ROWS
    programs = triton.cdiv(T, rows)
    dx = torch.empty_like(dout) if drops else dout
    partial = torch.empty((1, programs, H if bias_dtype else 0), dtype=torch.float32, device=dout.device)
    _dropout_backward_kernel[(programs, across)](
        dout,
        dx,
        partial,
        partial if amax is None else amax,
        dout if key is None else key,
        T,
        H,
        rows,
        reference.threshold(p),
        reference.keep_scale(p),
        BIAS=bias_dtype is not None,
        DROPS=drops,
        OBSERVES=amax is not None,
        ROWS=_BACKWARD_ROWS,
        COLUMNS=_COLUMNS,
        STAGES=stages,
        num_warps=_WARPS,
    )
    return dx, None if bias_dtype is None else sum_partials(partial, bias_dtype)[0]
