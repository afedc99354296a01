"""Update of amax histories at the end of a step, in one kernel instead of six.

The window is read and written once: 2.4 MB for the 288 tensors of a 24-layer model and 1024 steps, which stay in the L2
cache. The saving is launches. A program processes sixteen tensors, 64 contiguous bytes of each step.
"""

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger

_STEPS, _TENSORS = 64, 16
_INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _amax_history_kernel(
    newest_ptr,
    window_ptr,
    in_effect_ptr,
    length,
    N,
    TAKE_MAX: tl.constexpr,
    HOLD: tl.constexpr,
    STEPS: tl.constexpr,
    TENSORS: tl.constexpr,
):
    tensor = (tl.program_id(0) * TENSORS + tl.arange(0, TENSORS))[None, :]
    mine = tensor < N
    newest = tl.load(newest_ptr + tensor, mask=mine, other=0.0)
    rolls = mine & (newest > 0)
    found = newest
    if HOLD:
        bits = newest.to(tl.int32, bitcast=True)
        newest = tl.where(bits < _INF_BITS, newest, 0.0)
        found = tl.zeros_like(newest)
    # From the oldest steps on: only a chunk itself and the next one overwrite its entries.
    for chunk in range(tl.cdiv(length, STEPS) - 1, -1, -1):
        to = (chunk * STEPS + tl.arange(0, STEPS))[:, None]
        at = to * N + tensor
        inside = (to < length) & rolls
        moved = tl.load(window_ptr + at - N, mask=inside & (to > 0), other=0.0)
        if HOLD:
            found = larger(found, amax_along(moved, 0))
            newest = tl.where(found > 0, 0.0, newest)
        moved = tl.where(to == 0, newest, moved)
        tl.debug_barrier()  # other threads of this program may still read these addresses
        tl.store(window_ptr + at, moved, mask=inside)
        tl.debug_barrier()
        if TAKE_MAX:
            found = larger(found, amax_along(moved, 0))
    if HOLD:
        found = larger(found, newest)
    bits = found.to(tl.int32, bitcast=True)
    tl.store(in_effect_ptr + tensor, found, mask=rolls & (bits > 0) & (bits < _INF_BITS))
    tl.store(newest_ptr + tensor, tl.zeros([1, TENSORS], tl.float32), mask=mine)


def update_history_(
    newest: torch.Tensor, window: torch.Tensor, in_effect: torch.Tensor, take_max: bool, hold: bool = False
) -> None:
    """As ``reference.update_history_``; contiguous tensors, entries not negative."""
    length, N = window.shape
    grid = (triton.cdiv(N, _TENSORS),)
    _amax_history_kernel[grid](
        newest,
        window,
        in_effect,
        length,
        N,
        TAKE_MAX=take_max and not hold,
        HOLD=hold,
        STEPS=_STEPS,
        TENSORS=_TENSORS,
        num_warps=4,
    )
