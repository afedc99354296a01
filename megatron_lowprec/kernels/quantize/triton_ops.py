"""Triton functions on groups of entries [GROUP, P]: transform, scales, rounding; bits equal to ``reference.py``."""

import triton
import triton.language as tl

from megatron_lowprec.kernels.interpreted import INTERPRETED
from megatron_lowprec.kernels.quantize import rule

# bit sets indexed by MX.RULE
_DIVIDES = tl.constexpr(rule.rules_that("divides"))
_ROUNDS_AMAX = tl.constexpr(rule.rules_that("rounds_amax"))
_ROUNDS_UP = tl.constexpr(rule.rules_that("rounds_up"))
NOT_FLOOR = tl.constexpr(_DIVIDES.value | _ROUNDS_AMAX.value | _ROUNDS_UP.value)
# named values of ROUNDING
NEAREST_EVEN = tl.constexpr(rule.ROUNDINGS["nearest_even"])
HALF_AWAY = tl.constexpr(rule.ROUNDINGS["half_away"])
STOCHASTIC = tl.constexpr(rule.ROUNDINGS["stochastic"])


@triton.jit
def widened(words):
    """int32 words of two bf16 numbers -> fp32, in a new last dimension."""
    return tl.join((words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True))


@triton.jit
def groups_in_threads(x):
    """[GROUP, P], loaded in rows, as fp32 with a column in each thread.

    Neighbours along dimension 0 are split, which the layout of a load cannot, so the tile crosses shared memory here,
    before it is widened. Triton otherwise runs some of a long transform's stages in the load's layout, exchanges fp32
    twice, and repeats the other stages in two layouts.
    """
    GROUP: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(x, [GROUP // 2, 2, P]), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(even.to(tl.float32), odd.to(tl.float32)), (0, 2, 1)), [GROUP, P])


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
            # between a cast and its inverse Triton would change the layout, and compute the transform in two
            y = tl.inline_asm_elementwise(
                "{.reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, -65536;}",
                "=r,=r,r,r",
                [y.to(tl.int32, bitcast=True)],
                dtype=tl.int32,
                is_pure=True,
                pack=2,
            ).to(tl.float32, bitcast=True)
    return y


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
    return tl.where(is_nan, NAN_CODE, finite_codes(elements, MANTISSA, MIN_EXPONENT, BITS))


@triton.jit
def finite_codes(elements, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, BITS: tl.constexpr):
    """``element_codes`` of numbers."""
    # scaled as in round_to_grid: the code is above the bits of the mantissa that the format lacks
    bits = (elements * 2.0 ** (-126 - MIN_EXPONENT)).to(tl.int32, bitcast=True)
    return ((bits & 0x7FFFFFFF) >> (23 - MANTISSA)) | (((bits >> 31) & 1) << (BITS - 1))


@triton.jit
def decoded(codes, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, BITS: tl.constexpr):
    """fp32 of ``finite_codes``, int32."""
    bits = ((codes << (32 - BITS)) & -2147483648) | ((codes & ((1 << (BITS - 1)) - 1)) << (23 - MANTISSA))
    return bits.to(tl.float32, bitcast=True) * 2.0 ** (126 + MIN_EXPONENT)


@triton.jit
def packed_codes(codes):
    """int32 codes of 4 bits [GROUP, P] -> uint8 [GROUP / 2, P], entry 2i in the low nibble."""
    GROUP: tl.constexpr = codes.shape[0]
    P: tl.constexpr = codes.shape[1]
    low, high = tl.split(tl.permute(tl.reshape(codes, [GROUP // 2, 2, P]), (0, 2, 1)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def nvfp4_tile(codes_ptr, scale_ptr, tensor_scale_ptr, rows, first_n, M, N, BN: tl.constexpr):
    """fp32 [BM, BN] of a ``CodedMatrix`` [M, N], its columns from ``first_n``; zeros outside."""
    BM: tl.constexpr = rows.shape[0]
    row, inside = rows.to(tl.int64)[:, None], (rows < M)[:, None]
    pair = (first_n // 2 + tl.arange(0, BN // 2))[None, :]
    codes = tl.load(codes_ptr + row * (N // 2) + pair, mask=inside & (pair < N // 2), other=0).to(tl.int32)
    block = (first_n // 16 + tl.arange(0, BN // 16))[None, :]
    scale = tl.load(scale_ptr + row * (N // 16) + block, mask=inside & (block < N // 16), other=0).to(tl.int32)
    nan = tl.full([], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    decode = tl.where(scale == 0x7F, nan, decoded(scale, 3, -6, 8)) * tl.load(tensor_scale_ptr)
    elements = tl.join(decoded(codes & 0xF, 1, 0, 4), decoded(codes >> 4, 1, 0, 4))
    return tl.reshape(tl.reshape(elements, [BM, BN // 16, 16]) * decode[:, :, None], [BM, BN])
