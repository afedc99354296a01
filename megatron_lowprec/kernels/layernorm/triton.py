"""LayerNorm and RMSNorm with one read of x, and their backward pass with one read of x and dy.

Bytes an entry in bf16: forward 4 (x in, y out), backward 6 (x and dy in, dx out) and 2% for partial sums; 8 with the
residual's gradient, whose separate addition takes 6 more. For [32768, 1024] at 4.2 TB/s that is 32, 49 and 65
microseconds. A row is spread over all threads of a program, eight entries each, and a program has several rows. Partial
sums over rows, for the gradients of weight and bias, stay in registers until the program ends; ``bias_grad`` adds them
over programs. The rows of a program depend only on the sizes, so gradients have equal bits on every GPU. Only the order
of sums differs from ``reference.py``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger, raise_to_amax
from megatron_lowprec.kernels.bias_grad.triton import sum_partials
from megatron_lowprec.kernels.interpreted import INTERPRETED
from megatron_lowprec.kernels.layernorm.reference import Normalized


@triton.jit
def centered_norm(x, inside, eps, WIDTH: tl.constexpr, CENTERED: tl.constexpr):
    """fp32 [R, BLOCK] -> (x, less its mean if CENTERED, mean, rstd); entries of x beyond WIDTH are zeros."""
    mean = tl.sum(x, 1) / WIDTH
    if CENTERED:
        # two-pass variance, not a difference of squares: an offset costs no precision
        x = tl.where(inside, x - mean[:, None], 0.0)
    return x, mean, tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)


@triton.jit
def affine(x, rstd, weight, bias, CENTERED: tl.constexpr):
    """A norm's unrounded output from x of ``centered_norm``; the other fp32 operands broadcast to x.

    The multiply-add is explicit, so that all kernels give equal bits.
    """
    x = x * rstd
    return tl.fma(x, weight, bias) if CENTERED else x * weight


@triton.jit
def rounded_sum(x, y):
    """x + y in fp32, protected from contraction with the multiplication that gives x."""
    if INTERPRETED:
        total = x + y
    else:
        total = tl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return total


@triton.jit
def store_statistics(
    x_ptr, mean_ptr, rstd_ptr, first_row, T, eps,
    WIDTH: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store statistics of ROWS rows; returns x of ``centered_norm`` [ROWS, BLOCK] and rstd [ROWS].

    Kernels with equal ROWS, BLOCK and number of warps sum in the same order, so they give equal bits.
    """
    rows, columns = first_row + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (columns < WIDTH)[None, :]
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x, mean, rstd = centered_norm(x, inside, eps, WIDTH, CENTERED)
    if CENTERED:
        tl.store(mean_ptr + rows, mean, mask=rows < T)
    tl.store(rstd_ptr + rows, rstd, mask=rows < T)
    return x, rstd


@triton.jit
def _norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    amax_ptr,
    T,
    eps,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    OBSERVES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS
    x, rstd = store_statistics(x_ptr, mean_ptr, rstd_ptr, first_row, T, eps, WIDTH, CENTERED, ROWS, BLOCK)
    rows, columns = first_row + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (columns < WIDTH)[None, :]
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    bias = weight
    if CENTERED:
        bias = tl.load(bias_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    y = affine(x, rstd[:, None], weight[None, :], bias[None, :], CENTERED).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=inside)
    if OBSERVES:
        raise_to_amax(amax_ptr, tl.where(inside, y.to(tl.float32), 0.0))


@triton.jit
def _norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dresidual_ptr,
    dx_ptr,
    partial_ptr,
    amax_ptr,
    T,
    rows_a_program,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OBSERVES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    within = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=within, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([1, BLOCK], tl.float32)  # a column a thread: a whole reduction would cross warps for each row
    first = tl.program_id(0) * rows_a_program
    for start in tl.range(0, rows_a_program, ROWS, num_stages=STAGES):
        rows = first + start + tl.arange(0, ROWS)
        valid = rows < T
        inside = valid[:, None] & within[None, :]
        at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        x_hat = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=valid, other=0.0)
        if CENTERED:
            x_hat -= tl.load(mean_ptr + rows, mask=valid, other=0.0)[:, None]
            dbias += tl.sum(dy, 0)
        x_hat *= rstd[:, None]
        dweight += tl.sum(dy * x_hat, 0)
        wdy = dy * weight[None, :]
        dx = wdy - x_hat * (tl.sum(x_hat * wdy, 1) / WIDTH)[:, None]
        if CENTERED:
            dx -= (tl.sum(wdy, 1) / WIDTH)[:, None]
        dx = (dx * rstd[:, None]).to(dx_ptr.dtype.element_ty)
        if RESIDUAL:
            # dx is rounded before the sum, as in autograd
            dresidual = tl.load(dresidual_ptr + at, mask=inside, other=0.0).to(tl.float32)
            dx = rounded_sum(dx.to(tl.float32), dresidual).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + at, dx, mask=inside)
        if OBSERVES:
            largest = larger(largest, amax_along(tl.abs(tl.where(inside, dx.to(tl.float32), 0.0)), 0))
    if OBSERVES:
        raise_to_amax(amax_ptr, largest)
    at = tl.program_id(0) * WIDTH + columns
    tl.store(partial_ptr + at, dweight, mask=within)
    if CENTERED:
        tl.store(partial_ptr + tl.num_programs(0) * WIDTH + at, dbias, mask=within)


@triton.jit
def _norm_statistics_kernel(
    x_ptr, mean_ptr, rstd_ptr, T, eps,
    WIDTH: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    store_statistics(x_ptr, mean_ptr, rstd_ptr, tl.program_id(0) * ROWS, T, eps, WIDTH, CENTERED, ROWS, BLOCK)


class Tiling(NamedTuple):
    """Division of a norm into programs.

    Attributes:
        warps: warps of a program; each row is spread over all.
        rows: rows of a program of the forward pass.
        backward_rows: rows that a program of the backward pass holds at a time.
        programs: largest number of programs of the backward pass.
        stages: pipeline stages; 2 or more prefetch rows to shared memory.
    """

    warps: int
    rows: int
    backward_rows: int
    programs: int
    stages: int = 1


def tiling(width: int) -> Tiling:
    """Tiling with eight entries of a row a thread if the warps suffice; all backward programs run concurrently."""
    block = triton.next_power_of_2(width)
    warps = min(16, max(4, block // 256))
    # entries that a thread holds at a time: 32 in the forward pass, 16 of each of x and dy in the backward pass
    rows = max(1, warps * 1024 // block)
    # 512 threads on each of 128 multiprocessors: the registers suffice at 128 a thread
    return Tiling(warps, rows, max(1, rows // 2), 2048 // warps)


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, amax: torch.Tensor | None = None
) -> Normalized:
    """As ``reference.norm``; x contiguous."""
    T, width = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(T, dtype=torch.float32, device=x.device) if bias is not None else None
    rstd = torch.empty(T, dtype=torch.float32, device=x.device)
    sizes = tiling(width)
    _norm_forward_kernel[(triton.cdiv(T, sizes.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        rstd if mean is None else mean,
        rstd,
        rstd if amax is None else amax,
        T,
        eps,
        WIDTH=width,
        CENTERED=bias is not None,
        OBSERVES=amax is not None,
        ROWS=sizes.rows,
        BLOCK=triton.next_power_of_2(width),
        num_warps=sizes.warps,
    )
    return Normalized(y, mean, rstd)


def statistics(x: torch.Tensor, eps: float, centered: bool) -> torch.Tensor:
    """As ``reference.statistics``, bits equal to ``norm``; x contiguous."""
    T, width = x.shape
    found = torch.empty((1 + centered, T), dtype=torch.float32, device=x.device)
    sizes = tiling(width)
    _norm_statistics_kernel[(triton.cdiv(T, sizes.rows),)](
        x,
        found[-1],
        found[0],
        T,
        eps,
        WIDTH=width,
        CENTERED=centered,
        ROWS=sizes.rows,
        BLOCK=triton.next_power_of_2(width),
        num_warps=sizes.warps,
    )
    return found


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    *,
    sizes: Tiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As ``reference.norm_backward``; dy, x and dresidual contiguous."""
    T, width = x.shape
    sizes = sizes or tiling(width)
    rows = triton.cdiv(triton.cdiv(T, sizes.programs), sizes.backward_rows) * sizes.backward_rows
    programs = triton.cdiv(T, rows)
    dx = torch.empty_like(x)
    partial = torch.empty((1 if mean is None else 2, programs, width), dtype=torch.float32, device=x.device)
    _norm_backward_kernel[(programs,)](
        dy,
        x,
        weight,
        rstd if mean is None else mean,
        rstd,
        dy if dresidual is None else dresidual,
        dx,
        partial,
        partial if amax is None else amax,
        T,
        rows,
        WIDTH=width,
        CENTERED=mean is not None,
        RESIDUAL=dresidual is not None,
        OBSERVES=amax is not None,
        ROWS=sizes.backward_rows,
        BLOCK=triton.next_power_of_2(width),
        STAGES=sizes.stages,
        num_warps=sizes.warps,
    )
    sums = sum_partials(partial, weight.dtype)
    return dx, sums[0], None if mean is None else sums[1]
