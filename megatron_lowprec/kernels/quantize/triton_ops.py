"""Triton functions on groups of entries [GROUP, P]: transform, scales, rounding; bits equal to ``reference.py``."""

import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger
from megatron_lowprec.kernels.interpreted import INTERPRETED
from megatron_lowprec.kernels.philox.triton import draw_bits
from megatron_lowprec.kernels.quantize import rule

# bit sets indexed by MX.RULE
_DIVIDES = tl.constexpr(rule.rules_that("divides"))
_ROUNDS_AMAX = tl.constexpr(rule.rules_that("rounds_amax"))
_ROUNDS_UP = tl.constexpr(rule.rules_that("rounds_up"))
_NOT_FLOOR = tl.constexpr(_DIVIDES.value | _ROUNDS_AMAX.value | _ROUNDS_UP.value)
_CODED_DIVIDES = tl.constexpr(rule.rules_that("divides", "e4m3"))
_FP32_MAX = tl.constexpr(3.4028234663852886e38)
# named values of ROUNDING
NEAREST_EVEN = tl.constexpr(rule.ROUNDINGS["nearest_even"])
HALF_AWAY = tl.constexpr(rule.ROUNDINGS["half_away"])
STOCHASTIC = tl.constexpr(rule.ROUNDINGS["stochastic"])


@triton.jit
def hadamard(y, signs, GROUP: tl.constexpr):
    """Butterflies of stride GROUP/2 ... 1 along dimension 0; each stage rotates the index's top bit to the bottom."""
    P: tl.constexpr = y.shape[1]
    y = y * signs
    for s in tl.static_range(8):
        if (GROUP >> s) > 1:
            a, b = tl.split(tl.permute(tl.reshape(y, [2, GROUP // 2, P]), (1, 2, 0)))
            y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [GROUP, P])
    return y


@triton.jit
def transformed(y, signs_ptr, GROUP: tl.constexpr, ROUNDS: tl.constexpr, DTYPE: tl.constexpr):
    """The Hadamard transform of [GROUP, P] along dimension 0 with the signs in memory, rounded to DTYPE if asked."""
    y = hadamard(y, tl.load(signs_ptr + tl.arange(0, GROUP))[:, None], GROUP)
    if ROUNDS:
        y = rounded_to(y, DTYPE)
    return y


@triton.jit
def rounded_to(y, DTYPE: tl.constexpr):
    """fp32 rounded to bf16, nearest even, and widened again; fp32 stays as it is."""
    if tl.bfloat16 == DTYPE:
        if INTERPRETED:  # which truncates
            bits = y.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            y = tl.where(y == y, bits.to(tl.float32, bitcast=True), y)
        else:
            y = y.to(tl.bfloat16).to(tl.float32)
    return y


@triton.jit
def tensor_scale(amax_ptr, MX: tl.constexpr):
    """Encode and decode scale of a tensor, fp32 [1, 1], from the amax at ``amax_ptr``; ``reference.tensor_scale``."""
    amax = tl.load(amax_ptr + tl.zeros([1, 1], tl.int32))
    target = tl.full([1, 1], MX.TARGET, tl.float32)
    one = tl.full([1, 1], 1.0, tl.float32)
    known = tl.where(amax == 0.0, target, amax)
    if (_CODED_DIVIDES >> MX.RULE) & 1:
        decode = tl.div_rn(known, target)
        encode = tl.minimum(tl.div_rn(one, decode), _FP32_MAX)
    else:
        encode = tl.minimum(tl.div_rn(target, known), _FP32_MAX)
        decode = tl.minimum(tl.div_rn(one, encode), _FP32_MAX)
    finite = (amax.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    nan = tl.full([1, 1], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(finite, encode, nan), tl.where(finite, decode, nan)


@triton.jit
def write_tensor_scale(out_ptr, amax_ptr, first, MX: tl.constexpr):
    """Write a tensor's decode scale to ``out_ptr``, if there is one, in the ``first`` program."""
    if MX.TARGET > 0:
        _, decode = tensor_scale(amax_ptr, MX)
        zero = tl.zeros([1, 1], tl.int32)
        tl.store(out_ptr + zero, decode, mask=first & (zero == 0))


@triton.jit
def coded_scale(amax, amax_ptr, MX: tl.constexpr):
    """Value and encode scale of each block's coded scale, fp32, from its amax, as ``reference.coded_scale``."""
    encode_of_tensor = tl.full([1, 1], 1.0, tl.float32)
    decode_of_tensor = encode_of_tensor
    if MX.TARGET > 0:
        encode_of_tensor, decode_of_tensor = tensor_scale(amax_ptr, MX)
    if (_CODED_DIVIDES >> MX.RULE) & 1:
        number = tl.div_rn(amax, tl.full(amax.shape, MX.MAX, tl.float32))
        if MX.TARGET > 0:
            number = tl.div_rn(number, tl.broadcast_to(decode_of_tensor, amax.shape))
    else:
        number = amax * (encode_of_tensor * (1.0 / MX.MAX))
    value = round_to_grid(
        number, number, 0, MX.SCALE_MANTISSA, MX.SCALE_MIN_EXPONENT, MX.SCALE_MAX, NEAREST_EVEN, 0, True
    )
    value = tl.where(number == number, value, number)
    if (_CODED_DIVIDES >> MX.RULE) & 1:
        encode = tl.div_rn(tl.broadcast_to(encode_of_tensor, amax.shape), value)
    else:
        encode = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), value * decode_of_tensor)
    return value, tl.minimum(encode, _FP32_MAX)


@triton.jit
def e8m0(amax, MX: tl.constexpr):
    """E8M0 decode scale of each block, int32, from its amax, as ``reference.e8m0_scale``."""
    DIVIDES: tl.constexpr = (_DIVIDES >> MX.RULE) & 1
    number = amax
    if DIVIDES:
        number = tl.div_rn(amax, tl.full(amax.shape, MX.MAX, tl.float32))
    bits = number.to(tl.int32, bitcast=True)
    if (_ROUNDS_AMAX >> MX.RULE) & 1:
        HALF: tl.constexpr = 1 << (22 - MX.MANTISSA)
        if MX.MAX_EXPONENT > 0:
            bits += HALF
        else:  # a subnormal amax can leave byte 0
            bits += tl.where(bits < 0x800000, HALF // 2, HALF)
    byte = bits >> 23
    if (_ROUNDS_UP >> MX.RULE) & 1:
        byte += ((bits & 0x7FFFFF) > tl.where(byte == 0, 0x400000, 0)).to(tl.int32)
    if not DIVIDES:
        byte -= MX.MAX_EXPONENT
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    finite = (amax.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    return tl.where(finite, byte, 255)


@triton.jit
def power_of_two(byte):
    """E8M0 byte -> 2^(byte - 127) as fp32, NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def round_to_grid(
    v,
    draws,
    unit,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX: tl.constexpr,
    ROUNDING: tl.constexpr,
    RANDOM_BITS: tl.constexpr,
    SATURATES: tl.constexpr,
):
    """Round fp32 to the format's grid, saturating; NaN must come from the block's scale."""
    if ROUNDING == STOCHASTIC:
        if SATURATES:
            v = tl.minimum(tl.maximum(v, -MAX), MAX)
        # times a power of two that takes the format's smallest normal number to fp32's, 2^-126: a step is then the same
        # bit of the mantissa for normal and subnormal numbers, and the sign stays where it is
        SHIFT: tl.constexpr = 23 - MANTISSA
        bits = (v * 2.0 ** (-126 - MIN_EXPONENT)).to(tl.int32, bitcast=True)
        # u = (r + 1/2) 2^-RANDOM_BITS of a step, as an addend to the mantissa. Its unit is an argument, so the
        # compiler emits a multiply-add, which runs in parallel with the integer units, the bottleneck
        draws = (draws >> (16 - RANDOM_BITS)).to(tl.int32)
        bits = (draws * unit + (bits + ((1 << (SHIFT - RANDOM_BITS)) >> 1))) & (-1 << SHIFT)
        out = bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + MIN_EXPONENT)
    else:
        magnitude = tl.abs(v)
        if SATURATES:
            magnitude = tl.minimum(magnitude, MAX)
        field = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, (MIN_EXPONENT + 127) << 23)
        if ROUNDING == NEAREST_EVEN:
            # adding 1.5 * 2^23 steps rounds to a whole step, nearest even; the step follows from the exponent
            magic = (field + (((23 - MANTISSA) << 23) | 0x400000)).to(tl.float32, bitcast=True)
            rounded = (magnitude + magic) - magic
        else:
            step = field - (MANTISSA << 23)
            steps = magnitude * ((254 << 23) - step).to(tl.float32, bitcast=True)
            whole = tl.floor(steps)
            rounded = (whole + (steps - whole >= 0.5).to(tl.float32)) * step.to(tl.float32, bitcast=True)
        sign = v.to(tl.int32, bitcast=True) & -2147483648
        out = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return out


@triton.jit
def element_codes(
    elements, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, BITS: tl.constexpr, NAN_CODE: tl.constexpr, is_nan
):
    """fp32 values on the format's grid -> int32 codes in the low bits; ``NAN_CODE`` where ``is_nan``."""
    SMALLEST: tl.constexpr = 2.0**MIN_EXPONENT
    bits = elements.to(tl.int32, bitcast=True)
    magnitude = tl.abs(elements)
    normal = magnitude >= SMALLEST
    # as in round_to_grid: a subnormal number plus the smallest normal one has its code in the mantissa
    field = (magnitude + tl.where(normal, 0.0, SMALLEST)).to(tl.int32, bitcast=True) >> (23 - MANTISSA)
    code = field - tl.where(normal, (MIN_EXPONENT + 126) << MANTISSA, (MIN_EXPONENT + 127) << MANTISSA)
    return tl.where(is_nan, NAN_CODE, code | (((bits >> 31) & 1) << (BITS - 1)))


@triton.jit
def quantize_groups(
    y,
    row,
    first_column,
    start,
    gate_offset,
    gate_stride,
    signs_ptr,
    amax_ptr,
    key0,
    key1,
    step,
    microbatch,
    unit,
    MX: tl.constexpr,
    HADAMARD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[MX.GROUP, P] fp32, widened from DTYPE -> elements, and scale bytes, int32 [GROUP / BLOCK, P].

    Elements are fp32 [GROUP, P], dequantized; or, with ``MX.CODE_BITS`` above 0, int32 codes of that width,
    [GROUP, P], or uint8 [GROUP / 2, P] with two 4-bit codes a byte.
    """
    P: tl.constexpr = y.shape[1]
    GROUP: tl.constexpr = MX.GROUP
    BLOCKS: tl.constexpr = GROUP // MX.BLOCK
    if HADAMARD:
        y = transformed(y, signs_ptr, GROUP, MX.ROUNDS_TRANSFORM, DTYPE)
    blocks = tl.reshape(y, [BLOCKS, MX.BLOCK, P])
    amax = tl.reduce(tl.abs(blocks), 1, larger)
    if MX.BLOCK_ROWS > 1:  # neighbours along P share a block
        LANES: tl.constexpr = P // MX.BLOCK_ROWS
        shared = amax_along(tl.reshape(amax, [BLOCKS, LANES, MX.BLOCK_ROWS]), 2)
        amax = tl.reshape(tl.broadcast_to(shared, [BLOCKS, LANES, MX.BLOCK_ROWS]), [BLOCKS, P])
    if MX.SCALE_MANTISSA > 0:
        decode, encode = coded_scale(amax, amax_ptr, MX)
        is_nan = decode != decode
        byte = decode
        if MX.CODE_BITS > 0:
            byte = element_codes(decode, MX.SCALE_MANTISSA, MX.SCALE_MIN_EXPONENT, 8, MX.SCALE_NAN_CODE, is_nan)
        v = blocks * encode[:, None, :]
        if MX.HEADROOM != 1.0:
            v = v * MX.HEADROOM
    else:
        byte = e8m0(amax, MX)
        is_nan = byte == 255
        # 2^(127 - byte) is the byte 254 - byte; 255 stays NaN
        encode = power_of_two(tl.where(is_nan, 255, 254 - byte))
        decode = power_of_two(byte)
        v = blocks * (encode * MX.HEADROOM)[:, None, :]
    if MX.ROUNDING == STOCHASTIC:
        draws = tl.reshape(
            draw_bits(row, first_column, key0, key1, step, microbatch, start, gate_offset, gate_stride, GROUP),
            [GROUP // MX.BLOCK, MX.BLOCK, P],
        )
    else:
        draws = tl.zeros([1, 1, 1], tl.uint32)
    if MX.NATIVE and MX.MANTISSA == 3:
        elements = v.to(tl.float8e4nv)
    elif MX.NATIVE:
        elements = v.to(tl.float8e5)
    else:
        # the floor rule scales below 2^(MAX_EXPONENT + 1): with enough headroom no entry saturates
        ABOVE: tl.constexpr = MX.HEADROOM * 2.0 ** (MX.MAX_EXPONENT + 1) > MX.MAX
        CODED: tl.constexpr = MX.SCALE_MANTISSA > 0
        SATURATES: tl.constexpr = CODED or ((_NOT_FLOOR >> MX.RULE) & 1) != 0 or ABOVE
        elements = round_to_grid(
            v, draws, unit, MX.MANTISSA, MX.MIN_EXPONENT, MX.MAX, MX.ROUNDING, MX.RANDOM_BITS, SATURATES
        )
    if MX.CODE_BITS == 0:
        out = tl.reshape(elements.to(tl.float32) * decode[:, None, :], [GROUP, P])
    elif MX.NATIVE:
        out = tl.reshape(elements.to(tl.uint8, bitcast=True), [GROUP, P])
    else:
        codes = element_codes(elements, MX.MANTISSA, MX.MIN_EXPONENT, MX.CODE_BITS, MX.NAN_CODE, is_nan[:, None, :])
        if MX.CODE_BITS == 4:
            low, high = tl.split(tl.permute(tl.reshape(codes, [GROUP // 2, 2, P]), (0, 2, 1)))
            out = (low | (high << 4)).to(tl.uint8)
        else:
            out = tl.reshape(codes, [GROUP, P])  # the store converts them
    return out, byte
