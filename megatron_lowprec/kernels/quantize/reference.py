"""Scales and rounding in plain torch: the definition of every quantized bit in the project.

All operations are single IEEE operations in fp32, so codes and scales are equal on every device. Operands are [R, K]
with the contracted dimension last. A block is (rows, columns); partial blocks at the edges are scaled by their own
entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from megatron_lowprec.formats import E8M0_NAN, FORMATS, Format
from megatron_lowprec.kernels.chunks import row_chunks
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.scaling import SCALE_RULES

_EXPONENT_FIELD = 0x7F800000
_MANTISSA_FIELD = 0x007FFFFF
_HALF_OF_MIN_NORMAL = 0x00400000  # bits of 2^-127, subnormal in fp32 but a valid E8M0 scale
_NAN = 0x7FC00000
_FP32_MAX = torch.finfo(torch.float32).max

Uniform = Callable[[slice], torch.Tensor]
"""Row slice of the operand -> fp32 draws u of stochastic rounding, [rows, K], in [0, 1)."""


# ---- elements
def round_to_format(v: torch.Tensor, fmt: Format, rounding: str, uniform: torch.Tensor | None = None) -> torch.Tensor:
    """Round to the grid of ``fmt``, saturating at its maximum; NaN stays NaN, Inf saturates, zeros keep their sign.

    ``nearest_even`` and ``half_away`` differ at ties. ``stochastic`` rounds the magnitude up if its fraction f of a
    step reaches 1 - u, that is floor(f + u); with uniform u the result is unbiased. All steps are exact in fp32, with
    one exception: a magnitude below the smallest normal is first rounded to 2^-23 of it, so that a kernel can take its
    fraction from the bits of one sum.

    Args:
        v: fp32, any shape.
        uniform: u of the stochastic rounding, fp32 in [0, 1), the shape of ``v``.

    Returns:
        fp32 values of ``fmt``, the shape of ``v``.
    """
    v = v.clamp(-fmt.max if fmt.signed else 0.0, fmt.max)
    # the step at |v|, 2^(exponent - mantissa_bits), and its reciprocal are built from the exponent field
    binade = (v.view(torch.int32) & _EXPONENT_FIELD).clamp_(min=(fmt.min_exponent + 127) << 23)
    step = binade - (fmt.mantissa_bits << 23)
    magnitude = v.abs()
    if rounding == "stochastic":
        smallest = 2.0**fmt.min_exponent
        magnitude = torch.where(magnitude < smallest, (magnitude + smallest) - smallest, magnitude)
    steps = magnitude.mul_(((254 << 23) - step).view(torch.float32))
    if rounding == "nearest_even":
        rounded = steps.round_()
    else:
        rounded = steps.floor()
        threshold = 0.5 if rounding == "half_away" else 1.0 - _required(uniform)
        rounded += steps.sub_(rounded) >= threshold
    return rounded.mul_(step.view(torch.float32)).copysign_(v)


def _required(uniform: torch.Tensor | None) -> torch.Tensor:
    if uniform is None:
        raise ValueError("stochastic rounding needs its uniform draws")
    return uniform


def uniform_from_bits(bits: torch.Tensor, random_bits: int) -> torch.Tensor:
    """The top ``random_bits`` of 16-bit draws as u = (r + 1/2) / 2^random_bits, fp32.

    With the offset 1/2, a fraction f is rounded up for round(f 2^random_bits) of the 2^random_bits draws. This is exact
    for multiples of 2^-random_bits, else off by at most half of that, and unbiased on average over f.
    """
    return ((bits >> (16 - random_bits)).to(torch.float32) + 0.5) * 2.0**-random_bits


def encode(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Values on the grid of ``fmt`` -> codes in the low bits; NaN gives the format's NaN, else code 0.

    uint8, or int16 for formats of more than 8 bits.
    """
    v = values.to(torch.float32)
    bits = v.view(torch.int32)
    exponent = ((bits & _EXPONENT_FIELD) >> 23) - 127
    normal = ((exponent + fmt.bias) << fmt.mantissa_bits) | ((bits & _MANTISSA_FIELD) >> (23 - fmt.mantissa_bits))
    subnormal = (v.nan_to_num().abs() * 2.0 ** (fmt.mantissa_bits - fmt.min_exponent)).to(torch.int32)
    magnitude = torch.where(exponent < fmt.min_exponent, subnormal, normal)
    width = fmt.exponent_bits + fmt.mantissa_bits
    nan_code = 0 if fmt.specials == "none" else (1 << width) - 1
    magnitude = torch.where(v.isnan(), nan_code, magnitude)
    if fmt.specials == "ieee":
        magnitude = torch.where(v.isinf(), ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits, magnitude)
    codes = magnitude | (torch.signbit(v).to(torch.int32) << width) if fmt.signed else magnitude
    return codes.to(torch.uint8 if fmt.bits <= 8 else torch.int16)


def decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes of ``encode`` -> fp32 values, special codes included."""
    c = codes.to(torch.int32)
    exponent = (c >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = c & ((1 << fmt.mantissa_bits) - 1)
    fraction = mantissa.to(torch.float32) * 2.0**-fmt.mantissa_bits + (exponent > 0)
    value = torch.ldexp(fraction, exponent.clamp(min=1) - fmt.bias)
    top = exponent == (1 << fmt.exponent_bits) - 1
    if fmt.specials == "ieee":
        value = torch.where(top, torch.where(mantissa == 0, torch.inf, torch.nan), value)
    elif fmt.specials == "nan":
        value = torch.where(top & (mantissa == (1 << fmt.mantissa_bits) - 1), torch.nan, value)
    return torch.where((c >> (fmt.exponent_bits + fmt.mantissa_bits)) > 0, -value, value) if fmt.signed else value


# ---- scales
def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude in each block: fp32 [ceil(R / rows), ceil(K / columns)]; a NaN in the block gives NaN."""
    rows, columns = block
    magnitude = pad(x.abs(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    down, across = magnitude.shape[0] // rows, magnitude.shape[1] // columns
    return magnitude.reshape(down, rows, across, columns).amax(dim=(1, 3)).to(torch.float32)


def e8m0_scale(amax: torch.Tensor, fmt: Format, rule: str) -> torch.Tensor:
    """E8M0 decode scale of each block from its amax, by an E8M0 rule of ``scaling.SCALE_RULES``.

    Zero gives byte 0 (2^-127); NaN and Inf give ``E8M0_NAN``; the exponent saturates to [-127, 127]. floor(log2) is
    the exponent field, since a floating-point log2 errs just below powers of two.

    Args:
        amax: fp32, any shape, not negative.

    Returns:
        uint8, the shape of ``amax``.
    """
    row = SCALE_RULES[rule]
    number = amax / torch.full_like(amax, fmt.max) if row.divides else amax
    bits = number.view(torch.int32)
    if row.rounds_amax:
        # half a step of the mantissa; a subnormal number that can leave byte 0 lies in the binade below
        bits = bits + torch.where(bits < 1 << 23, 1 << (21 - fmt.mantissa_bits), 1 << (22 - fmt.mantissa_bits))
    byte = bits >> 23
    if row.rounds_up:
        # a subnormal number is at most 2^-127, byte 0, or at most 2^-126, byte 1
        at_most_power = torch.where(byte == 0, _HALF_OF_MIN_NORMAL, 0)
        byte = byte + ((bits & _MANTISSA_FIELD) > at_most_power)
    if not row.divides:
        byte = byte - fmt.max_exponent
    byte = byte.clamp_(0, E8M0_NAN - 1)
    return torch.where(amax.isfinite(), byte, E8M0_NAN).to(torch.uint8)


def e8m0_decode_scale(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> fp32 decode scale, which multiplies a decoded element: 2^(byte - 127), NaN for 255."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 0, _HALF_OF_MIN_NORMAL, b << 23)
    return torch.where(b == E8M0_NAN, _NAN, bits).view(torch.float32)


def e8m0_encode_scale(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> fp32 encode scale, which multiplies an entry before rounding: 2^(127 - byte), NaN for 255."""
    b = byte.to(torch.int32)
    bits = torch.where(b == E8M0_NAN - 1, _HALF_OF_MIN_NORMAL, (E8M0_NAN - 1 - b) << 23)
    return torch.where(b == E8M0_NAN, _NAN, bits).view(torch.float32)


def fp32_encode_scale(
    amax: torch.Tensor, fmt: Format, rule: str, amax_floor: float = 0.0, margin: int = 0
) -> torch.Tensor:
    """fp32 encode scale, which multiplies a block before rounding: s = fl((M / 2^margin) / amax), M = ``fmt.max``.

    The decode scale is fl(1 / s). ``amax_pow2`` truncates s to a power of two. amax 0 gives 1. A quotient beyond fp32
    gives its maximum, as in TransformerEngine's delayed scaling; NaN and Inf give NaN, so that they propagate.

    Args:
        amax: fp32, any shape, not negative.

    Returns:
        fp32, the shape of ``amax``.
    """
    # fp64 holds amax_floor unrounded, and its quotient rounds to the correctly rounded fp32 one
    scaled_max = torch.full_like(amax, fmt.max * 2.0**-margin, dtype=torch.float64)
    scale = (scaled_max / amax.double().clamp(min=amax_floor)).float().clamp_(max=_FP32_MAX)
    scale = torch.where((amax == 0) & (amax_floor == 0.0), torch.ones_like(scale), scale)
    if SCALE_RULES[rule].power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan)


class TensorScale(NamedTuple):
    """fp32 scales of a whole tensor, [1, 1]: ``encode`` multiplies entries, ``decode`` decoded elements.

    Or [R, 1], if each row of an operand is a tensor of its own.
    """

    encode: torch.Tensor
    decode: torch.Tensor


def tensor_scale(amax: torch.Tensor, target: float, rule: str, margin: int = 0) -> TensorScale:
    """Scale of a tensor from its amax, by a coded rule of ``scaling.SCALE_RULES``; T = target / 2^margin.

    ``product`` has encode = fl(T / amax) and decode = fl(1 / encode), ``quotient`` decode = fl(amax / T) and encode =
    fl(1 / decode). amax 0 gives 1. Encode scales end at fp32's maximum; NaN and Inf give NaN.

    Args:
        amax: fp32 [1, 1] or [R, 1], not negative.
    """
    scaled_max = torch.full_like(amax, target * 2.0**-margin)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    known = torch.where(amax == 0, scaled_max, amax)
    first = known / scaled_max if SCALE_RULES[rule].divides else (scaled_max / known).clamp(max=_FP32_MAX)
    second = (torch.ones_like(first) / first).clamp(max=_FP32_MAX)
    return TensorScale(second, first) if SCALE_RULES[rule].divides else TensorScale(first, second)


def coded_scale(
    amax: torch.Tensor,
    fmt: Format,
    scale_fmt: Format,
    rule: str,
    of_tensor: TensorScale | None,
    rounding: str = "nearest_even",
    uniform: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and encode scale of each block's coded scale, by a coded rule of ``scaling.SCALE_RULES``.

    The value is A G / M rounded to ``scale_fmt``, saturating. The encode scale is the reciprocal of the value times the
    tensor's decode scale; a value of 0 has fp32's maximum, so its entries saturate and decode to 0.

    Args:
        amax: fp32 amax A of each block, any shape.
        of_tensor: None for no tensor scale.
        uniform: draws of stochastic rounding, the shape of ``amax``.

    Returns:
        fp32 values on the grid of ``scale_fmt``, and fp32 encode scales.
    """
    one = torch.ones((1, 1), device=amax.device)
    tensor = TensorScale(one, one) if of_tensor is None else of_tensor
    largest = torch.full_like(one, fmt.max)
    if SCALE_RULES[rule].divides:
        value = round_to_format((amax / largest) / tensor.decode, scale_fmt, rounding, uniform)
        encode_scale = tensor.encode / value
    else:
        value = round_to_format(amax * (tensor.encode * (one / largest)), scale_fmt, rounding, uniform)
        encode_scale = torch.ones_like(value) / (value * tensor.decode)
    return value, encode_scale.clamp(max=_FP32_MAX)


# ---- operands
def quantize_operand(
    x: torch.Tensor,
    fmt: Format,
    block: tuple[int, int],
    *,
    scale_format: str,
    scale_rule: str,
    rounding: str = "nearest_even",
    headroom: float = 1.0,
    amax_floor: float = 0.0,
    encode_scale: torch.Tensor | None = None,
    of_tensor: TensorScale | None = None,
    signs: torch.Tensor | None = None,
    uniform: Uniform | None = None,
    scale_rounding: str = "nearest_even",
    scale_uniform: Uniform | None = None,
    dequantize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transform, scale and round an operand.

    Args:
        x: [R, K] bf16, fp16 or fp32, any strides; K a multiple of len(signs) if ``signs`` is given.
        block: (rows, columns) that share a scale.
        scale_format, scale_rule, rounding, headroom, amax_floor: as in ``recipe.schema.QuantSpec``.
        encode_scale: fp32, one entry a block, if the scale is known (delayed, or shared by ranks).
        of_tensor: scale of the tensor above coded block scales; None for no such level.
        signs: [g], applies the Hadamard transform first.
        uniform: draws of stochastic rounding.
        scale_rounding, scale_uniform: of coded scales; a block takes the draw of its first entry.
        dequantize: multiply the elements by their block's scale; exact in bf16's range for a power of two and for the
            coded scales of a ``QuantSpec``.

    Returns:
        elements: [R, K] in the dtype of x, values on the grid of ``fmt`` (exact in bf16), or dequantized.
        scale: fp32 decode scales, or codes of block scales (uint8), [ceil(R / rows), ceil(K / columns)].
    """
    elements = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = [
        torch.empty(0, -(-x.shape[1] // block[1]), dtype=torch.float32 if scale_format == "fp32" else torch.uint8)
    ]
    shared = encode_scale is not None and encode_scale.shape[0] == 1
    scale_rows = 1 if shared else block[0]
    for chunk in row_chunks(x.shape[0], x.shape[1], x.device, multiple_of=scale_rows):
        part = x[chunk].to(torch.float32) if signs is None else hadamard_transform(x[chunk], signs)
        if encode_scale is not None:
            rows = slice(chunk.start // scale_rows, -(-chunk.stop // scale_rows))
            encoder = encode_scale if shared else encode_scale[rows]
            scale = decoder = torch.ones_like(encoder) / encoder
        elif scale_format == "e8m0":
            scale = e8m0_scale(block_amax(part, block), fmt, scale_rule)
            encoder, decoder = e8m0_encode_scale(scale), e8m0_decode_scale(scale)
        elif scale_format != "fp32":
            draws = None if scale_uniform is None else scale_uniform(chunk)[:: block[0], :: block[1]]
            scale_fmt, amax, tensor = FORMATS[scale_format], block_amax(part, block), of_tensor
            if tensor is not None and len(tensor.encode) > 1:
                tensor = TensorScale(tensor.encode[chunk], tensor.decode[chunk])
            decoder, encoder = coded_scale(amax, fmt, scale_fmt, scale_rule, tensor, scale_rounding, draws)
            scale = encode(decoder, scale_fmt)
        else:
            encoder = fp32_encode_scale(block_amax(part, block), fmt, scale_rule, amax_floor)
            scale = decoder = torch.ones_like(encoder) / encoder
        scales.append(scale)
        scaled = scale_blocks(part, encoder, block)
        if headroom != 1.0:
            scaled = scaled * headroom
        draws = uniform(chunk) if uniform is not None and rounding == "stochastic" else None
        rounded = round_to_format(scaled, fmt, rounding, draws)
        elements[chunk] = scale_blocks(rounded, decoder, block) if dequantize else rounded
    return elements, scales[-1] if shared or len(scales) == 1 else torch.cat(scales[1:])


def scale_blocks(x: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """x [R, K] times the scale of each entry's block; a scale dimension of size 1 is broadcast."""
    rows, columns = x.shape
    if block[0] == 1 and scale.shape[1] > 1 and columns % block[1] == 0:
        return (x.reshape(rows, columns // block[1], block[1]) * scale.unsqueeze(-1)).reshape(rows, columns)
    for dim in (0, 1):
        if scale.shape[dim] > 1 and block[dim] > 1:
            scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, x.shape[dim])
    return x * scale
