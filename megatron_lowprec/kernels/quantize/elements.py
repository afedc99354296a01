"""Elements in plain torch: rounding to a format's grid, and codes. Single IEEE operations in fp32."""

import torch

from megatron_lowprec.formats import Format

_EXPONENT_FIELD = 0x7F800000
_MANTISSA_FIELD = 0x007FFFFF


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


def packed(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] of 4-bit codes [..., K] of any strides: entry 2i in the low bits, rows contiguous."""
    codes = codes.contiguous()  # else bytes lie as the codes do
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., K] of ``packed`` ones, uint8 [..., K / 2]."""
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


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
