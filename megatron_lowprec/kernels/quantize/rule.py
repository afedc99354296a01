"""MX quantization rules, and the constants of the kernels compiled for them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.scaling import SCALE_RULES

ROUNDINGS = {"nearest_even": 0, "half_away": 1, "stochastic": 2}


def converts_fp8(device: torch.device) -> bool:
    """Whether instructions convert between fp32 and FP8: GPUs of compute capability 8.9 and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def rules_that(attribute: str) -> int:
    """Bit set of the E8M0 rules with an attribute of ``ScaleRule``, by the rules' numbers."""
    rows = [row for row in SCALE_RULES.values() if "e8m0" in row.scale_formats]
    return sum(1 << row.number for row in rows if getattr(row, attribute))


class Direction(NamedTuple):
    """Arguments of one direction, rowwise or columnwise, of an MX quantization.

    Attributes:
        key: Philox key of stochastic rounding.
        signs: fp32 [g] of +-1/sqrt(g) for the Hadamard transform, from ``hadamard.triton.scaled_signs``; None for no
            transform.
    """

    key: Key = Key()
    signs: torch.Tensor | None = None


class MxConstants(NamedTuple):
    """The constexpr ``MX`` of the kernel, passed as a whole to the functions that it calls. Numbers only.

    Names and order are part of the key of a cached tiling in ``kernels.tuning``.

    Attributes:
        PACKED: whether two bf16 numbers are read as a word.
        ALONG_ROWS, ALONG_COLUMNS: whether rowwise and columnwise data are written.
        BLOCK: consecutive entries that share a scale.
        GROUP: consecutive entries in a thread: the transform's block, or an MX block without a transform.
        HADAMARD: whether groups are transformed.
        MANTISSA, MIN_EXPONENT, MAX, MAX_EXPONENT: properties of the format.
        RULE: ``ScaleRule.number`` of the scale rule.
        ROUNDING: number of the rounding in ROUNDINGS.
        RANDOM_BITS: bits of a draw that stochastic rounding uses.
        HEADROOM: factor applied before rounding.
        CODE_BITS: bits of a code; 0 for dequantized operands.
        NAN_CODE: the format's NaN code; 0 if it has none.
        NATIVE: whether the GPU's conversion rounds; false in the interpreter.
    """

    PACKED: bool
    ALONG_ROWS: bool
    ALONG_COLUMNS: bool
    BLOCK: int
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
    NATIVE: bool


@dataclass(frozen=True)
class MxRule:
    """Rule of an MX quantization, fields as in ``recipe.schema.QuantSpec``; the same for both directions.

    ``block`` is the number of entries along the contracted dimension that share a scale, a power of two from 8 up.
    It caches the kernels specialized for it, since the lookup must cost less than a launch.
    """

    fmt: Format
    scale_rule: str
    rounding: str = "nearest_even"
    random_bits: int = 16
    headroom: float = 1.0
    block: int = 32
    kernels: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def constants(
        self, transform: int, rows: bool, columns: bool, packed: bool, codes: bool, converts: bool
    ) -> MxConstants:
        """Constants of the kernel that writes these outputs.

        Args:
            transform: block of the transform, a multiple of ``block``; 0 for none.
            converts: ``converts_fp8`` of the device.
        """
        fmt = self.fmt
        return MxConstants(
            PACKED=packed,
            ALONG_ROWS=rows,
            ALONG_COLUMNS=columns,
            BLOCK=self.block,
            GROUP=transform or self.block,
            HADAMARD=transform > 0,
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
            NATIVE=converts and fmt.name in ("e4m3", "e5m2") and self.rounding == "nearest_even",
        )
