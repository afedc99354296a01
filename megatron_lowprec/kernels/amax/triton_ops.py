"""Largest magnitudes inside Triton programs: numbers that are not negative compare as their bits do, NaN above all."""

import triton
import triton.language as tl

from megatron_lowprec.kernels.interpreted import INTERPRETED


@triton.jit
def amax_along(magnitude, axis: tl.constexpr):
    """Largest along an axis, NaN above all."""
    if INTERPRETED:  # which takes minutes for a reduction by anything but Triton's own functions
        bits = tl.max(magnitude.to(tl.int32, bitcast=True), axis, keep_dims=True)
        found = bits.to(tl.float32, bitcast=True)
    else:  # absolute values come free with a floating-point maximum
        found = tl.reduce(magnitude, axis, larger, keep_dims=True)
    return found


@triton.jit
def larger(a, b):
    """The larger of entries that are not negative, NaN above all."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def raise_to_amax(amax_ptr, x):
    """Raise the fp32 at ``amax_ptr`` to the amax of x [R, C]; the order of programs does not matter to a maximum."""
    amax = amax_along(amax_along(tl.abs(x), 1), 0).to(tl.int32, bitcast=True)
    cell = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tl.zeros([1, 1], tl.int32)
    tl.atomic_max(cell, amax, sem="relaxed")
