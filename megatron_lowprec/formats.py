"""Table of number formats. A new format is a new row; the tests iterate over the table.

A code has sign, if the format has one, exponent and mantissa from the top bit down. Except for special codes its value
is
``(-1)^sign * 2^(max(exponent, 1) - bias) * (mantissa / 2^mantissa_bits + (exponent > 0))``.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Format:
    """One format of elements, of scales or of both.

    Attributes:
        max: largest finite magnitude.
        specials: non-finite codes. ``"none"``: all codes are finite; ``"nan"``: only the all-ones magnitude is NaN, as
            in E4M3 FN; ``"ieee"``: the top exponent encodes Inf and NaN.
        signed: whether a code has a sign bit; formats without one are for scales only.
        dtype: name of torch's dtype of the codes; ``""`` where torch has none that computes.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    specials: Literal["none", "nan", "ieee"]
    source: str
    signed: bool = True
    dtype: str = ""

    @property
    def bits(self) -> int:
        """Width of a code, sign included."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def significant_bits(self) -> int:
        """Bits of the significand, the leading one included; the product of two values has at most the sum of both."""
        return self.mantissa_bits + 1

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
_E1M2 = "arXiv 2606.20381; the grid is uniform, and its unit cancels in the scale"
_UE4M3 = "arXiv 2509.25149; the nonnegative half of E4M3"

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("e4m3", 4, 3, bias=7, max=448.0, specials="nan", source=_OCP_FP8, dtype="float8_e4m3fn"),
        Format("e5m2", 5, 2, bias=15, max=57344.0, specials="ieee", source=_OCP_FP8, dtype="float8_e5m2"),
        Format("e2m3", 2, 3, bias=1, max=7.5, specials="none", source=_OCP_MX),
        Format("e3m2", 3, 2, bias=3, max=28.0, specials="none", source=_OCP_MX),
        Format("e2m1", 2, 1, bias=1, max=6.0, specials="none", source=_OCP_MX),
        Format("e1m2", 1, 2, bias=1, max=1.75, specials="none", source=_E1M2),
        Format("e5m6", 5, 6, bias=15, max=65024.0, specials="ieee", source=_E5M6),
        Format("ue4m3", 4, 3, bias=7, max=448.0, specials="nan", source=_UE4M3, signed=False),
        Format("ue5m3", 5, 3, bias=15, max=61440.0, specials="ieee", source="arXiv 2509.17791", signed=False),
    )
}
ELEMENT_FORMATS = {name: fmt for name, fmt in FORMATS.items() if fmt.signed}
"""Formats that an operand's elements can have."""

E8M0_BIAS = 127
"""Exponent bias of OCP's E8M0: scale byte b is 2^(b - 127), for b in 0..254."""
E8M0_NAN = 255
"""Scale byte of a block with a NaN or an Inf; the whole block becomes NaN."""
