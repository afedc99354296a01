"""Tables of granularities and scale rules, read by validation, references and kernels.

Shapes are those of an operand [R, K], contracted dimension last.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

CODED_SCALE_FORMATS = ("e4m3", "ue4m3", "ue5m3")
"""Rows of ``formats.FORMATS`` whose codes are scales: rounded to nearest even, saturating, with zero."""
SCALE_FORMATS = ("fp32", "e8m0", *CODED_SCALE_FORMATS)
"""Formats of a block's scale. A coded format is one entry here and one row of ``formats.FORMATS``."""


@dataclass(frozen=True)
class Granularity:
    """Block of ``rows`` by ``columns`` entries that share a scale; None for the whole dimension."""

    name: str
    rows: int | None
    columns: int | None

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) of a block; None if it depends on the operand's shape."""
        return None if self.rows is None or self.columns is None else (self.rows, self.columns)

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """(rows, columns) of a block of an operand [rows, columns]; at least 1 each."""
        return self.rows or max(1, rows), self.columns or max(1, columns)


GRANULARITIES: dict[str, Granularity] = {
    row.name: row
    for row in (  # kernels number granularities by table index, which is part of stored tuning keys
        Granularity("tensor", None, None),
        Granularity("row", 1, None),
        Granularity("1x128", 1, 128),
        Granularity("128x128", 128, 128),
        Granularity("1x32", 1, 32),
    )
}
"""Granularities that kernels support. References support blocks of any size."""

_BLOCK = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")
_LARGEST_BLOCK = 1 << 20  # entries: references pad an operand to whole blocks


@lru_cache(maxsize=64)
def granularity_of(name: str) -> Granularity:
    """The granularity of that name, either a row of GRANULARITIES or any block ``RxC``.

    Raises:
        ValueError: ``name`` is neither, or a block of more than 2^20 entries.
    """
    found = GRANULARITIES.get(name)
    if found is None:
        sizes = _BLOCK.fullmatch(name)
        if sizes is None or int(sizes[1]) * int(sizes[2]) > _LARGEST_BLOCK:
            raise ValueError(
                f"granularity {name!r} is not tensor, row or ROWSxCOLUMNS such as 1x32, of up to 2^20 entries"
            )
        found = Granularity(name, int(sizes[1]), int(sizes[2]))
    return found


@dataclass(frozen=True)
class ScaleRule:
    """Rule for a block's scale from its amax A; M is the format's maximum, emax its exponent.

    An fp32 rule gives the encode scale M / A, an E8M0 rule the decode scale's exponent floor(log2 A) - emax, and a rule
    of coded formats the decode scale A G / M, with the encode scale G of the whole tensor.

    Attributes:
        scale_formats: formats that have the rule.
        power_of_two: scales are powers of two; an fp32 rule rounds M / A down.
        divides: in E8M0, the exponent is that of A / M, instead of that of A less emax. In coded formats, the quotient
            A / M is divided by the tensor's decode scale; else A or A / M is multiplied by G.
        rounds_amax: in E8M0, A is first rounded to the element's mantissa.
        rounds_up: in E8M0, the exponent is ceil(log2), not floor(log2).
        scales_last: in coded formats that multiply, the quotient A / M is multiplied by G; else A by G (1 / M).
        in_steps: in coded formats that divide, the tensor's amax is divided by the largest block scale, then by M.
    """

    name: str
    scale_formats: tuple[str, ...]
    source: str
    power_of_two: bool = True
    divides: bool = False
    rounds_amax: bool = False
    rounds_up: bool = False
    scales_last: bool = False
    in_steps: bool = False

    @property
    def number(self) -> int:
        """The rule's number in kernels: its index among the rules of its scale format, part of stored tuning keys."""
        return scale_rules(self.scale_formats[0]).index(self.name)


SCALE_RULES: dict[str, ScaleRule] = {
    row.name: row
    for row in (
        ScaleRule("amax", ("fp32",), "TransformerEngine, DeepGEMM", power_of_two=False),
        ScaleRule("amax_pow2", ("fp32",), "TransformerEngine, torchao"),
        ScaleRule("floor", ("e8m0",), "OCP Microscaling Formats v1.0, section 6.3"),
        ScaleRule("round_up", ("e8m0",), "arXiv 2506.08027; torchao's RCEIL", divides=True, rounds_up=True),
        ScaleRule("ceil", ("e8m0",), "torchao", rounds_up=True),
        ScaleRule("even", ("e8m0",), "torchao", rounds_amax=True),
        ScaleRule("product", CODED_SCALE_FORMATS, "TransformerEngine's NVFP4", power_of_two=False),
        ScaleRule("quotient", CODED_SCALE_FORMATS, "torchao's NVFP4", power_of_two=False, divides=True),
        ScaleRule(
            "base",
            CODED_SCALE_FORMATS,
            "four-over-six: TransformerEngine, arXiv 2512.02010",
            power_of_two=False,
            scales_last=True,
        ),
        ScaleRule("divided", CODED_SCALE_FORMATS, "arXiv 2601.22813", power_of_two=False, divides=True, in_steps=True),
    )
}


@lru_cache(maxsize=8)
def scale_rules(scale_format: str) -> tuple[str, ...]:
    """Names of a scale format's rules."""
    return tuple(row.name for row in SCALE_RULES.values() if scale_format in row.scale_formats)
