"""Table of number formats. A new format is a new row; the tests iterate over the table.

A code has sign, exponent and mantissa from the top bit down. Except for special codes its value is
``(-1)^sign * 2^(max(exponent, 1) - bias) * (mantissa / 2^mantissa_bits + (exponent > 0))``.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Format:
    """One element format.

    ``max`` is the largest finite magnitude. ``specials`` names the non-finite codes: ``"none"`` (all codes are
    finite), ``"nan"`` (only the all-ones magnitude is NaN, as in E4M3 FN) or ``"ieee"`` (the top exponent encodes Inf
    and NaN).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    specials: Literal["none", "nan", "ieee"]
    source: str

    @property
    def bits(self) -> int:
        """Width of a code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """Exponent of ``max``, "emax" in the OCP specification: 8 for E4M3, 2 for E2M1."""
        return (1 << self.exponent_bits) - 1 - self.bias - (self.specials == "ieee")

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormals share it."""
        return 1 - self.bias

    @property
    def smallest(self) -> float:
        """The smallest positive number, which is subnormal."""
        return float(2.0 ** (self.min_exponent - self.mantissa_bits))


_OCP_MX = "OCP Microscaling Formats v1.0, section 5.3"
_OCP_FP8 = "OCP 8-bit Floating Point v1.0; arXiv 2209.05433"
_E5M6 = "arXiv 2412.19437, section 3.3.3; bias and specials, which it leaves open, as E5M2: the upper 12 bits of FP16"

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("e4m3", 4, 3, bias=7, max=448.0, specials="nan", source=_OCP_FP8),
        Format("e5m2", 5, 2, bias=15, max=57344.0, specials="ieee", source=_OCP_FP8),
        Format("e2m3", 2, 3, bias=1, max=7.5, specials="none", source=_OCP_MX),
        Format("e3m2", 3, 2, bias=3, max=28.0, specials="none", source=_OCP_MX),
        Format("e2m1", 2, 1, bias=1, max=6.0, specials="none", source=_OCP_MX),
        Format("e5m6", 5, 6, bias=15, max=65024.0, specials="ieee", source=_E5M6),
    )
}

E8M0_BIAS = 127
"""Exponent bias of OCP's E8M0: scale byte b is 2^(b - 127), for b in 0..254."""
E8M0_NAN = 255
"""Scale byte of a block with a NaN or an Inf; the whole block becomes NaN."""
