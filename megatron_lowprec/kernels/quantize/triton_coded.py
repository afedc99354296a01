"""Triton functions of coded block scales and the tensor scale above them; bits equal ``coded_scale.py``."""

import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, larger
from megatron_lowprec.kernels.quantize import coded_scale as reference
from megatron_lowprec.kernels.quantize import rule
from megatron_lowprec.kernels.quantize.triton_ops import NEAREST_EVEN, round_to_grid

# bit sets indexed by MX.RULE
_DIVIDES = tl.constexpr(rule.rules_that("divides", "e4m3"))
_SCALES_LAST = tl.constexpr(rule.rules_that("scales_last", "e4m3"))
_IN_STEPS = tl.constexpr(rule.rules_that("in_steps", "e4m3"))
_FP32_MAX = tl.constexpr(3.4028234663852886e38)
_AT_FOUR = tl.constexpr(reference.AT_FOUR)
# named values of ZERO_CODE and FOUR_OVER_SIX
_FLUSH, _ONE = tl.constexpr(rule.ZERO_CODES["flush"]), tl.constexpr(rule.ZERO_CODES["one"])
_MSE, _ABS_MAX = tl.constexpr(rule.MEASURES["mse"]), tl.constexpr(rule.MEASURES["abs_max"])


@triton.jit
def tensor_amax(amax_ptr, MX: tl.constexpr):
    """The tensor's amax for ``tensor_scale``; 0 for a rule without one.

    A number that is loaded once. From a tensor of one entry, Triton's several layouts each load and divide again.
    """
    amax = 0.0
    if MX.TARGET > 0:
        amax = tl.load(amax_ptr)
    return amax


@triton.jit
def tensor_scale(amax, MX: tl.constexpr):
    """Encode scale, decode scale and shortfall of a tensor, fp32, from its amax."""
    target = tl.full([], MX.TARGET, tl.float32)
    one = tl.full([], 1.0, tl.float32)
    known = tl.where(amax == 0.0, target, amax)
    if (_DIVIDES >> MX.RULE) & 1:
        if (_IN_STEPS >> MX.RULE) & 1:
            of_scales = tl.full([], MX.TARGET / MX.LARGEST, tl.float32)
            decode = tl.div_rn(tl.div_rn(known, of_scales), tl.full([], MX.LARGEST, tl.float32))
        else:
            decode = tl.div_rn(known, target)
        decode = tl.where((amax == 0.0) | (decode == 0.0), one, decode)
        encode = tl.minimum(tl.div_rn(one, decode), _FP32_MAX)
    else:
        encode = tl.minimum(tl.div_rn(target, known), _FP32_MAX)
        decode = tl.minimum(tl.div_rn(one, encode), _FP32_MAX)
    shortfall = tl.where(encode == _FP32_MAX, tl.div_rn(known * encode, target), one)
    finite = (amax.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    nan = tl.full([], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(finite, encode, nan), tl.where(finite, decode, nan), shortfall


@triton.jit
def write_tensor_scale(out_ptr, amax, first, MX: tl.constexpr):
    """Write a tensor's decode scale to ``out_ptr``, if there is one, in the ``first`` program."""
    if MX.TARGET > 0:
        _, decode, _ = tensor_scale(amax, MX)
        tl.store(out_ptr, decode, mask=first)


@triton.jit
def _rounded_scale(number, draws, ROUNDING: tl.constexpr, MX: tl.constexpr):
    """fp32 numbers, not negative, rounded to the format of scales; NaN stays NaN."""
    value = round_to_grid(
        number,
        draws,
        1 << max(0, 23 - MX.SCALE_MANTISSA - MX.RANDOM_BITS),
        MX.SCALE_MANTISSA,
        MX.SCALE_MIN_EXPONENT,
        MX.SCALE_MAX,
        ROUNDING,
        MX.RANDOM_BITS,
        True,
    )
    return tl.where(number == number, value, number)


@triton.jit
def _scale_of(amax, encode_above, decode_above, draws, FACTOR: tl.constexpr, MX: tl.constexpr):
    """Value and encode scale of each block's coded scale, fp32, from its amax."""
    largest = tl.full(amax.shape, MX.LARGEST, tl.float32)
    if MX.TARGET == 0:
        amax = tl.where(amax < float("inf"), amax, float("nan"))
    if (_DIVIDES >> MX.RULE) & 1:
        number = tl.div_rn(amax, largest)
        if FACTOR != 1.0:
            number = number * FACTOR
        if MX.TARGET > 0:
            number = tl.div_rn(number, tl.broadcast_to(decode_above, amax.shape))
    else:
        if (_SCALES_LAST >> MX.RULE) & 1:
            number = tl.div_rn(amax, largest) * encode_above
        else:
            number = amax * (encode_above * MX.INVERSE_LARGEST)
        if FACTOR != 1.0:
            number = number * FACTOR
    ROUNDING: tl.constexpr = NEAREST_EVEN if MX.EDEN else MX.SCALE_ROUNDING
    value = _rounded_scale(number, draws, ROUNDING, MX)
    if MX.ZERO_CODE == _ONE:
        value = tl.where(value == 0.0, 1.0, value)
    if ((_DIVIDES >> MX.RULE) & 1) and not ((_IN_STEPS >> MX.RULE) & 1):
        encode = tl.div_rn(tl.broadcast_to(encode_above, amax.shape), value)
    else:
        encode = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), value * decode_above)
    encode = tl.minimum(encode, _FP32_MAX)
    if MX.ZERO_CODE == _FLUSH:
        encode = tl.where(value == 0.0, 0.0, encode)
    return value, encode


@triton.jit
def _candidate(
    blocks, amax, encode_above, decode_above, draws, scale_draws, unit, FACTOR: tl.constexpr, MX: tl.constexpr
):
    """Scales [BLOCKS, P], scaled entries and elements [BLOCKS, BLOCK, P]."""
    value, encode = _scale_of(amax, encode_above, decode_above, scale_draws, FACTOR, MX)
    v = blocks * encode[:, None, :]
    if MX.HEADROOM != 1.0:
        v = v * MX.HEADROOM
    elements = round_to_grid(v, draws, unit, MX.MANTISSA, MX.MIN_EXPONENT, MX.MAX, MX.ROUNDING, MX.RANDOM_BITS, True)
    return value, v, elements


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def by_halves(x, LENGTH: tl.constexpr, COMBINE: tl.constexpr):
    """[A, LENGTH, P] -> [A, P]: dimension 1 reduced by ``COMBINE`` of its halves, until one entry is left."""
    A: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[2]
    for s in tl.static_range(8):
        if (LENGTH >> s) > 1:
            first, second = tl.split(tl.permute(tl.reshape(x, [A, 2, LENGTH >> (s + 1), P]), (0, 2, 3, 1)))
            x = COMBINE(first, second)
    return tl.reshape(x, [A, P])


@triton.jit
def sum_by_halves(x, LENGTH: tl.constexpr):
    """[A, LENGTH, P] -> [A, P]: ``blocks.block_sum`` along dimension 1."""
    return by_halves(x, LENGTH, _plus)


@triton.jit
def sum_of_blocks(x, MX: tl.constexpr):
    """[BLOCKS, BLOCK, P] -> sum of each block, [BLOCKS, P]; the operand's columns are added first."""
    BLOCKS: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[2]
    R: tl.constexpr = MX.BLOCK_ROWS
    if R == 1:
        total = sum_by_halves(x, MX.BLOCK)
    else:
        if MX.LANES_FIRST:
            by_lanes = sum_by_halves(tl.reshape(x, [BLOCKS * MX.BLOCK * (P // R), R, 1]), R)
            total = sum_by_halves(tl.reshape(by_lanes, [BLOCKS, MX.BLOCK, P // R]), MX.BLOCK)
        else:
            total = sum_by_halves(tl.reshape(sum_by_halves(x, MX.BLOCK), [BLOCKS * (P // R), R, 1]), R)
        total = over_lanes(tl.reshape(total, [BLOCKS, P // R]), R)
    return total


@triton.jit
def over_lanes(x, R: tl.constexpr):
    """[A, P / R] -> [A, P]: each entry for the R lanes of its block."""
    A: tl.constexpr = x.shape[0]
    LANES: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], [A, LANES, R]), [A, LANES * R])


@triton.jit
def amax_of_blocks(magnitude, MX: tl.constexpr):
    """[BLOCKS, BLOCK, P] -> largest entry of each block, [BLOCKS, P]."""
    BLOCKS: tl.constexpr = magnitude.shape[0]
    P: tl.constexpr = magnitude.shape[2]
    if MX.BLOCK_ROWS == 1 and MX.SCALE_MANTISSA > 0:
        # in one order whatever the layout: two that Triton makes merge again, and their divisions
        amax = by_halves(magnitude, MX.BLOCK, larger)
    else:
        amax = tl.reduce(magnitude, 1, larger)
    if MX.BLOCK_ROWS > 1:  # neighbours along P share a block
        shared = amax_along(tl.reshape(amax, [BLOCKS, P // MX.BLOCK_ROWS, MX.BLOCK_ROWS]), 2)
        amax = over_lanes(tl.reshape(shared, [BLOCKS, P // MX.BLOCK_ROWS]), MX.BLOCK_ROWS)
    return amax


@triton.jit
def _error_of(elements, value, in_scales, MX: tl.constexpr):
    """Error of each block, [BLOCKS, P], as ``coded_scale.block_error``."""
    error = tl.abs(elements * value[:, None, :] - in_scales)
    if MX.FOUR_OVER_SIX == _ABS_MAX:
        found = amax_of_blocks(error, MX)
    else:
        if MX.FOUR_OVER_SIX == _MSE:
            error = error * error
        found = sum_of_blocks(error, MX)
    return found


@triton.jit
def quantize_coded(blocks, amax, amax_of_tensor, draws, scale_draws, unit, MX: tl.constexpr):
    """Elements of [BLOCKS, BLOCK, P] fp32, and values of its scales [BLOCKS, P], from the blocks' amaxes."""
    BLOCKS: tl.constexpr = blocks.shape[0]
    P: tl.constexpr = blocks.shape[2]
    encode_above = tl.full([], 1.0, tl.float32)
    decode_above, shortfall = encode_above, encode_above
    if MX.TARGET > 0:
        encode_above, decode_above, shortfall = tensor_scale(amax_of_tensor, MX)
    value, v, elements = _candidate(blocks, amax, encode_above, decode_above, draws, scale_draws, unit, 1.0, MX)
    if MX.FOUR_OVER_SIX > 0:
        value_4, v_4, elements_4 = _candidate(
            blocks, amax, encode_above, decode_above, draws, scale_draws, unit, _AT_FOUR, MX
        )
        in_scales = blocks * encode_above
        error = _error_of(elements, value * shortfall, in_scales, MX)
        at_four = _error_of(elements_4, value_4 * shortfall, in_scales, MX) < error
        value = tl.where(at_four, value_4, value)
        v = tl.where(at_four[:, None, :], v_4, v)
        elements = tl.where(at_four[:, None, :], elements_4, elements)
    if MX.EDEN:
        GROUP: tl.constexpr = BLOCKS * MX.BLOCK
        squares = sum_by_halves(tl.reshape(v * v, [1, GROUP, P]), GROUP)
        products = sum_by_halves(tl.reshape(v * elements, [1, GROUP, P]), GROUP)
        factor = tl.where(products == 0.0, 1.0, tl.div_rn(squares, products))
        value = _rounded_scale(value * factor, scale_draws, MX.SCALE_ROUNDING, MX)
    return elements, value
