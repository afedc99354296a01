"""Formats in exact arithmetic, written from the specifications and not from the package: the tests' other side."""

from fractions import Fraction
from functools import cache

import torch

from megatron_lowprec.formats import Format


def exact_value(code: int, fmt: Format) -> Fraction | float:
    """Sign, exponent, mantissa from the top bit down: a Fraction, or float inf/nan."""
    sign = -1 if fmt.signed and code >> (fmt.bits - 1) else 1
    exponent = (code >> fmt.mantissa_bits) % 2**fmt.exponent_bits
    mantissa = code % 2**fmt.mantissa_bits
    all_ones = exponent == 2**fmt.exponent_bits - 1
    if fmt.specials == "ieee" and all_ones:
        return float("nan") if mantissa else sign * float("inf")
    if fmt.specials == "nan" and all_ones and mantissa == 2**fmt.mantissa_bits - 1:
        return float("nan")
    leading = 2**fmt.mantissa_bits if exponent else 0
    return sign * Fraction(mantissa + leading) * Fraction(2) ** (max(exponent, 1) - fmt.bias - fmt.mantissa_bits)


@cache
def magnitudes(fmt: Format) -> torch.Tensor:
    """float64 magnitudes of the format, ascending: entry i is the value of code i."""
    values = (exact_value(code, fmt) for code in range(1 << (fmt.exponent_bits + fmt.mantissa_bits)))
    return torch.tensor([float(v) for v in values if isinstance(v, Fraction)], dtype=torch.float64)


def nearest(x: torch.Tensor, fmt: Format, ties: str) -> torch.Tensor:
    """float64 nearest value of the format by search in its table, saturating; ties "nearest_even" or "half_away"."""
    table = magnitudes(fmt)
    magnitude = x.double().abs().clamp(max=table[-1]).contiguous()
    above = torch.searchsorted(table, magnitude.nan_to_num()).clamp(min=1)
    low, high = table[above - 1], table[above]
    twice, middle = 2 * magnitude, low + high  # both exact in float64 for fp32 x
    up = twice > middle
    # code above - 1 belongs to low: an odd code loses the tie to its even neighbour
    up |= (twice == middle) & ((above % 2 == 0) if ties == "nearest_even" else torch.tensor(True))
    rounded = torch.where(up, high, low)
    return torch.where(x.isnan(), torch.nan, rounded).copysign(x.double())


def floor_log2(value: Fraction) -> int:
    """Largest k with 2^k <= value, for value > 0."""
    k = value.numerator.bit_length() - value.denominator.bit_length()
    return k if Fraction(2) ** k <= value else k - 1


def ceil_log2(value: Fraction) -> int:
    """Smallest k with value <= 2^k, for value > 0."""
    k = floor_log2(value)
    return k if Fraction(2) ** k == value else k + 1


def to_fp32(value: Fraction) -> Fraction:
    """Nearest fp32 number, ties to even, for value >= 0; beyond the largest it gives the largest."""
    if value == 0:
        return value
    grain = Fraction(2) ** (max(floor_log2(value), -126) - 23)
    return min(round(value / grain) * grain, Fraction(2) ** 128 - Fraction(2) ** 104)
