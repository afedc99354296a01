"""How a matrix becomes MX operands, and what of it is fixed when the kernel is compiled."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.scaling import GRANULARITIES, SCALE_RULES

ROUNDINGS = {"nearest_even": 0, "half_away": 1, "stochastic": 2}
MX_BLOCK = GRANULARITIES["1x32"].columns or 0


def rules_that(attribute: str) -> int:
    """The E8M0 rules with that attribute of ``ScaleRule``, as a set of bits by the rules' numbers."""
    rows = [row for row in SCALE_RULES.values() if row.scale_format == "e8m0"]
    return sum(1 << row.number for row in rows if getattr(row, attribute))


class Direction(NamedTuple):
    """One way to quantize a matrix: the key of its rounding, and its transform.

    Attributes:
        key: of stochastic rounding.
        signs: fp32 [g] of +-1/sqrt(g) for the Hadamard transform, from ``hadamard.triton.scaled_signs``; None for no
            transform.
    """

    key: Key = Key()
    signs: torch.Tensor | None = None


class MxConstants(NamedTuple):
    """The constexpr ``MX`` of the kernel, which it hands on whole to the functions that it calls. Numbers alone.

    Names and order are part of the key under which ``kernels.tuning`` remembers a tiling.

    Attributes:
        PACKED: whether two bf16 numbers are read as a word.
        ALONG_ROWS, ALONG_COLUMNS: which operands are made.
        GROUP: consecutive entries that a thread has: the transform's block, or a block of MX without one.
        HADAMARD: whether groups are transformed.
        MANTISSA, MIN_EXPONENT, MAX, MAX_EXPONENT: of the format.
        RULE: number of the row of SCALE_RULES.
        ROUNDING: of ROUNDINGS.
        RANDOM_BITS: of a draw that stochastic rounding takes.
        HEADROOM: factor of what is rounded.
        CODE_BITS: of a code; 0 for dequantized operands.
        NAN_CODE: of the format.
    """

    PACKED: bool
    ALONG_ROWS: bool
    ALONG_COLUMNS: bool
    GROUP: int
    HADAMARD: bool
    MANTISSA: int
    MIN_EXPONENT: int
    MAX: float
    MAX_EXPONENT: int
    RULE: int
    ROUNDING: int
    RANDOM_BITS: int
    HEADROOM: float
    CODE_BITS: int
    NAN_CODE: int


@dataclass(frozen=True)
class MxRule:
    """How entries become elements, as in ``recipe.schema.QuantSpec``; one for both directions.

    It keeps the kernels that were specialized for it: looking one up must cost less than launching it.
    """

    fmt: Format
    scale_rule: str
    rounding: str = "nearest_even"
    random_bits: int = 16
    headroom: float = 1.0
    kernels: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def constants(self, block: int, rows: bool, columns: bool, packed: bool, codes: bool) -> MxConstants:
        """Of the kernel that gives these operands by this rule; ``block`` of the transform, 0 for none."""
        fmt = self.fmt
        return MxConstants(
            PACKED=packed,
            ALONG_ROWS=rows,
            ALONG_COLUMNS=columns,
            GROUP=block or MX_BLOCK,
            HADAMARD=block > 0,
            MANTISSA=fmt.mantissa_bits,
            MIN_EXPONENT=fmt.min_exponent,
            MAX=fmt.max,
            MAX_EXPONENT=fmt.max_exponent,
            RULE=SCALE_RULES[self.scale_rule].number,
            ROUNDING=ROUNDINGS[self.rounding],
            RANDOM_BITS=self.random_bits,
            HEADROOM=self.headroom,
            CODE_BITS=fmt.bits if codes else 0,
            NAN_CODE=0 if fmt.specials == "none" else (1 << (fmt.bits - 1)) - 1,
        )
