"""What a Triton program does with groups of entries held as [GROUP, P]; the bits are ``reference.py``'s."""

import triton
import triton.language as tl

from megatron_lowprec.kernels.philox.triton import draw_bits

MX_BLOCK = tl.constexpr(32)


@triton.jit
def nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def hadamard(y, signs, GROUP: tl.constexpr):
    """Butterflies of stride GROUP/2 ... 1 along dimension 0: a stage moves the index's top bit to the bottom."""
    P: tl.constexpr = y.shape[1]
    y = y * signs
    for s in tl.static_range(8):
        if (GROUP >> s) > 1:
            a, b = tl.split(tl.permute(tl.reshape(y, [2, GROUP // 2, P]), (1, 2, 0)))
            y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [GROUP, P])
    return y


@triton.jit
def e8m0(amax, MANTISSA: tl.constexpr, MAX: tl.constexpr, MAX_EXPONENT: tl.constexpr, RULE: tl.constexpr):
    """Scale byte of each block, int32, from its amax; see ``reference.e8m0_scale``."""
    number = amax
    if RULE == 1:
        number = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    bits = number.to(tl.int32, bitcast=True)
    if RULE == 3:
        bits += 1 << (22 - MANTISSA)
    byte = bits >> 23
    if RULE == 1 or RULE == 2:
        byte += ((bits & 0x7FFFFF) > tl.where(byte == 0, 0x400000, 0)).to(tl.int32)
    if RULE != 1:
        byte -= MAX_EXPONENT
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
    """Round fp32 to the format's grid, saturating; NaN is left to the block's scale."""
    SMALLEST: tl.constexpr = 2.0**MIN_EXPONENT
    magnitude = tl.abs(v)
    if SATURATES:
        magnitude = tl.minimum(magnitude, MAX)
    if ROUNDING == 0:
        # adding 1.5 * 2^23 steps leaves no bit below a step, rounded to nearest even; the step follows the exponent
        field = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, (MIN_EXPONENT + 127) << 23)
        magic = (field + (((23 - MANTISSA) << 23) | 0x400000)).to(tl.float32, bitcast=True)
        rounded = (magnitude + magic) - magic
    else:
        # from SMALLEST up a step is 2^MANTISSA-th of the binade: below, adding SMALLEST brings the magnitude there
        offset = tl.where(magnitude < SMALLEST, SMALLEST, 0.0)
        if ROUNDING == 1:
            bits = magnitude.to(tl.int32, bitcast=True)
            step = tl.maximum(bits & 0x7F800000, (MIN_EXPONENT + 127) << 23) - (MANTISSA << 23)
            steps = magnitude * ((254 << 23) - step).to(tl.float32, bitcast=True)
            whole = tl.floor(steps)
            rounded = (whole + (steps - whole >= 0.5).to(tl.float32)) * step.to(tl.float32, bitcast=True)
        else:
            SHIFT: tl.constexpr = 23 - MANTISSA
            bits = (magnitude + offset).to(tl.int32, bitcast=True)
            # u = (r + 1/2) 2^-RANDOM_BITS of a step, as an addend to the mantissa. Its unit comes as an argument, so
            # that the compiler keeps a multiply-add, which runs beside the integer units; those are the bottleneck
            draws = (draws >> (16 - RANDOM_BITS)).to(tl.int32)
            bits = (draws * unit + (bits + (1 << (SHIFT - RANDOM_BITS - 1)))) & (-1 << SHIFT)
            rounded = bits.to(tl.float32, bitcast=True) - offset
    sign = v.to(tl.int32, bitcast=True) & -2147483648
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def element_codes(
    elements, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, BITS: tl.constexpr, NAN_CODE: tl.constexpr, is_nan
):
    """fp32 values on the format's grid -> int32 codes in the low bits; ``NAN_CODE`` where ``is_nan``."""
    SMALLEST: tl.constexpr = 2.0**MIN_EXPONENT
    bits = elements.to(tl.int32, bitcast=True)
    magnitude = tl.abs(elements)
    normal = magnitude >= SMALLEST
    # as in the rounding: a subnormal number plus the smallest normal one has its code in the mantissa
    field = (magnitude + tl.where(normal, 0.0, SMALLEST)).to(tl.int32, bitcast=True) >> (23 - MANTISSA)
    code = field - tl.where(normal, (MIN_EXPONENT + 126) << MANTISSA, (MIN_EXPONENT + 127) << MANTISSA)
    return tl.where(is_nan, NAN_CODE, code | (((bits >> 31) & 1) << (BITS - 1)))


@triton.jit
def quantize_groups(
    y,
    row,
    first_column,
    start,
    seam,
    jump,
    signs_ptr,
    key0,
    key1,
    step,
    microbatch,
    unit,
    GROUP: tl.constexpr,
    HADAMARD: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    RULE: tl.constexpr,
    ROUNDING: tl.constexpr,
    RANDOM_BITS: tl.constexpr,
    HEADROOM: tl.constexpr,
    CODE_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    """[GROUP, P] fp32 -> elements and scale bytes, int32 [GROUP / 32, P].

    Elements are fp32 [GROUP, P] times their scale, or, with ``CODE_BITS`` above 0, uint8 codes of that many bits, two
    of 4 bits a byte: [GROUP or GROUP / 2, P].
    """
    P: tl.constexpr = y.shape[1]
    if HADAMARD:
        signs = tl.load(signs_ptr + tl.arange(0, GROUP))
        y = hadamard(y, signs[:, None], GROUP)
    blocks = tl.reshape(y, [GROUP // MX_BLOCK, MX_BLOCK, P])
    amax = tl.reduce(tl.abs(blocks), 1, nan_maximum)
    byte = e8m0(amax, MANTISSA, MAX, MAX_EXPONENT, RULE)
    # 2^(127 - byte): the byte 254 - byte, but 255 stays NaN
    encode = power_of_two(tl.where(byte == 255, 255, 254 - byte))
    v = blocks * (encode * HEADROOM)[:, None, :]
    if ROUNDING == 2:
        draws = tl.reshape(
            draw_bits(row, first_column, key0, key1, step, microbatch, start, seam, jump, GROUP),
            [GROUP // MX_BLOCK, MX_BLOCK, P],
        )
    else:
        draws = tl.zeros([1, 1, 1], tl.uint32)
    # below 2^(MAX_EXPONENT + 1) times the scale by the floor rule: with enough headroom nothing can saturate
    SATURATES: tl.constexpr = RULE != 0 or HEADROOM * 2.0 ** (MAX_EXPONENT + 1) > MAX
    elements = round_to_grid(v, draws, unit, MANTISSA, MIN_EXPONENT, MAX, ROUNDING, RANDOM_BITS, SATURATES)
    if CODE_BITS == 0:
        out = tl.reshape(elements * power_of_two(byte)[:, None, :], [GROUP, P])
    else:
        codes = element_codes(elements, MANTISSA, MIN_EXPONENT, CODE_BITS, NAN_CODE, (byte == 255)[:, None, :])
        if CODE_BITS == 4:
            low, high = tl.split(tl.permute(tl.reshape(codes, [GROUP // 2, 2, P]), (0, 2, 1)))
            out = (low | (high << 4)).to(tl.uint8)
        else:
            out = tl.reshape(codes, [GROUP, P]).to(tl.uint8)
    return out, byte
