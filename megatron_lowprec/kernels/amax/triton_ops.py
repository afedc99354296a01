"""Largest magnitudes in Triton programs. Nonnegative numbers compare as their bits do, with NaN as the largest."""

import triton
import triton.language as tl

from megatron_lowprec.kernels.interpreted import INTERPRETED


@triton.jit
def amax_along(magnitude, axis: tl.constexpr):
    """The largest entry along an axis, which gets size 1; NaN compares as the largest."""
    if INTERPRETED:  # the interpreter takes minutes for a reduction by a custom function
        bits = tl.max(magnitude.to(tl.int32, bitcast=True), axis, keep_dims=True)
        found = bits.to(tl.float32, bitcast=True)
    else:  # absolute values come free with a floating-point maximum
        found = tl.reduce(magnitude, axis, larger, keep_dims=True)
    return found


@triton.jit
def larger(a, b):
    """Elementwise larger of two nonnegative entries; NaN compares as the largest."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_magnitude(so_far, x):
    """Entrywise larger of ``so_far`` and the magnitude of x, bf16; NaN compares as the largest. Two at once."""
    found = tl.inline_asm_elementwise(
        "{.reg .b32 magnitude; and.b32 magnitude, $2, 0x7fff7fff; max.NaN.bf16x2 $0, $1, magnitude;}",
        "=r,r,r",
        [so_far.to(tl.int16, bitcast=True), x.to(tl.int16, bitcast=True)],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return found.to(tl.bfloat16, bitcast=True)


@triton.jit
def raise_to_amax(amax_ptr, x):
    """Raise the fp32 at ``amax_ptr`` to the amax of x [R, C]; a maximum does not depend on the order of programs."""
    amax = amax_along(amax_along(tl.abs(x), 1), 0).to(tl.int32, bitcast=True)
    cell = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tl.zeros([1, 1], tl.int32)
    tl.atomic_max(cell, amax, sem="relaxed")
