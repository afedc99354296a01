"""Groups of entries [GROUP, P] quantized in Triton: transform, scales, rounding; bits equal ``reference.py``.

A thread holds one group, or several: what runs along dimension 0 exchanges no data.
"""

import triton
import triton.language as tl

from megatron_lowprec.kernels.philox.triton import draw_bits, philox, place
from megatron_lowprec.kernels.quantize.triton_coded import amax_of_blocks, quantize_coded, tensor_scale
from megatron_lowprec.kernels.quantize.triton_ops import (
    NOT_FLOOR,
    STOCHASTIC,
    e8m0,
    element_codes,
    finite_codes,
    packed_codes,
    power_of_two,
    round_to_grid,
    transformed,
)


@triton.jit
def _draws(row, first_column, key0, key1, step, microbatch, start, gate_offset, gate_stride, MX: tl.constexpr):
    """Draws of the entries' stochastic rounding, uint32 [BLOCKS, BLOCK, P]; without it zeros [1, 1, 1]."""
    if MX.ROUNDING == STOCHASTIC:
        P: tl.constexpr = row.shape[0]
        bits = draw_bits(row, first_column, key0, key1, step, microbatch, start, gate_offset, gate_stride, MX.GROUP)
        draws = tl.reshape(bits, [MX.GROUP // MX.BLOCK, MX.BLOCK, P])
    else:
        draws = tl.zeros([1, 1, 1], tl.uint32)
    return draws


@triton.jit
def quantize_groups(
    y,
    row,
    first_column,
    start,
    gate_offset,
    gate_stride,
    signs_ptr,
    amax_of_tensor,
    key0,
    key1,
    scale_key0,
    scale_key1,
    step,
    microbatch,
    unit,
    MX: tl.constexpr,
    HADAMARD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[MX.GROUP, P] fp32, widened from DTYPE -> elements, scale bytes, int32 [GROUP / BLOCK, P], and packed codes.

    Elements are fp32 [GROUP, P], dequantized; or, with ``MX.CODE_BITS`` above 0, int32 codes of that width,
    [GROUP, P], or uint8 [GROUP / 2, P] with two 4-bit codes a byte. ``MX.BESIDE`` has such codes beside values; others
    return no codes of use.
    """
    P: tl.constexpr = y.shape[1]
    GROUP: tl.constexpr = MX.GROUP
    BLOCKS: tl.constexpr = GROUP // MX.BLOCK
    if HADAMARD:
        y = transformed(y, signs_ptr, GROUP, MX.ROUNDS_TRANSFORM, DTYPE)
    blocks = tl.reshape(y, [BLOCKS, MX.BLOCK, P])
    amax = amax_of_blocks(tl.abs(blocks), MX)
    if MX.SCALE_MANTISSA > 0:
        draws = _draws(row, first_column, key0, key1, step, microbatch, start, gate_offset, gate_stride, MX)
        scale_draws = tl.zeros([1, 1], tl.uint32)
        if MX.SCALE_ROUNDING == STOCHASTIC:
            column = first_column[None, :] + tl.arange(0, BLOCKS)[:, None] * MX.BLOCK
            call = place(column, start, gate_offset, gate_stride) // 8
            zero = tl.zeros([1, 1], tl.uint32)
            words, _, _, _ = philox(call, row[None, :], zero + step, zero + microbatch, scale_key0, scale_key1)
            scale_draws = words & 0xFFFF
        elements, decode = quantize_coded(blocks, amax, amax_of_tensor, draws, scale_draws, unit, MX)
        is_nan = decode != decode
        byte = decode
        if MX.CODE_BITS > 0 or MX.BESIDE:
            byte = element_codes(decode, MX.SCALE_MANTISSA, MX.SCALE_MIN_EXPONENT, 8, MX.SCALE_NAN_CODE, is_nan)
        if MX.WHOLE:
            _, above, _ = tensor_scale(amax_of_tensor, MX)
            decode = decode * above
    else:
        byte = e8m0(amax, MX)
        is_nan = byte == 255
        # 2^(127 - byte) is the byte 254 - byte; 255 stays NaN
        encode = power_of_two(tl.where(is_nan, 255, 254 - byte))
        decode = power_of_two(byte)
        v = blocks * (encode * MX.HEADROOM)[:, None, :]
        draws = _draws(row, first_column, key0, key1, step, microbatch, start, gate_offset, gate_stride, MX)
        if MX.NATIVE and MX.MANTISSA == 3:
            elements = v.to(tl.float8e4nv)
        elif MX.NATIVE:
            elements = v.to(tl.float8e5)
        else:
            # the floor rule scales below 2^(MAX_EXPONENT + 1): with enough headroom no entry saturates
            ABOVE: tl.constexpr = MX.HEADROOM * 2.0 ** (MX.MAX_EXPONENT + 1) > MX.MAX
            SATURATES: tl.constexpr = ((NOT_FLOOR >> MX.RULE) & 1) != 0 or ABOVE
            elements = round_to_grid(
                v, draws, unit, MX.MANTISSA, MX.MIN_EXPONENT, MX.MAX, MX.ROUNDING, MX.RANDOM_BITS, SATURATES
            )
    beside = byte
    if MX.BESIDE:  # the scale of a NaN tells it
        codes = finite_codes(elements, MX.MANTISSA, MX.MIN_EXPONENT, 4)
        beside = packed_codes(tl.reshape(codes, [GROUP, P]))
    if MX.CODE_BITS == 0:
        out = tl.reshape(elements.to(tl.float32) * decode[:, None, :], [GROUP, P])
    elif MX.NATIVE:
        out = tl.reshape(elements.to(tl.uint8, bitcast=True), [GROUP, P])
    else:
        codes = element_codes(elements, MX.MANTISSA, MX.MIN_EXPONENT, MX.CODE_BITS, MX.NAN_CODE, is_nan[:, None, :])
        out = tl.reshape(codes, [GROUP, P])  # the store converts them
        if MX.CODE_BITS == 4:
            out = packed_codes(out)
    return out, byte, beside
