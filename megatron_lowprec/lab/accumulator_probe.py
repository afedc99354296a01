"""Crafted sums that show how an FP8 product accumulates: bits kept, alignment, truncation, terms at once, promotion.

A probe sees only the product, so the same functions examine a GPU and the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gemm.fp8_accumulator import Fp8Accumulator, fp8_product
from megatron_lowprec.kernels.gemm.native import ROW_MULTIPLE, scaled_gemm
from megatron_lowprec.kernels.gemm.reference import Product

LENGTH = 512
EXPONENT = 14  # of the large addend
CUT = 192  # position of the first of two small addends
Case = Mapping[int, tuple[float, float]]
"""Position along K -> the two factors there; zeros elsewhere."""


def native_product(device: torch.device, fast: bool) -> Product:
    """E4M3 elements [M, K] and [N, K] on any device -> fp32 [M, N] from the GPU's FP8 units, on the CPU."""
    one = torch.ones(1, 1, device=device)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = scaled_gemm(
            *(x.to(device, torch.float8_e4m3fn) for x in (a, b)),
            a_scale=one,
            b_scale=one,
            a_granularity="tensor",
            b_granularity="tensor",
            out_dtype=torch.float32,
            fast_accumulation=fast,
        )
        return found.cpu()

    return product


def reference_product(accumulator: Fp8Accumulator) -> Product:
    """The same from ``fp8_product``."""
    return lambda a, b: fp8_product(a, b, FORMATS["e4m3"], FORMATS["e4m3"], accumulator)


def sums(product: Product, cases: Sequence[Case]) -> list[float]:
    """The sum of each case."""
    a, b = torch.zeros(2, -(-len(cases) // ROW_MULTIPLE) * ROW_MULTIPLE, LENGTH)
    for row, case in enumerate(cases):
        for at, factors in case.items():
            a[row, at], b[row, at] = factors
    return product(a, b).diagonal()[: len(cases)].tolist()


def findings(product: Product) -> dict[str, str]:
    """Property -> what the product shows."""
    bits = fraction_bits(product)
    unit = EXPONENT - bits
    large = _power(EXPONENT)
    beside = {
        "addends of 1 and of 0.5 units count as": {0: large, 1: _power(unit), 2: _power(unit - 1)},
        "an addend of 1.5 units counts as": {0: large, 1: _times(_power(unit - 1), 3.0)},
        "an addend of -0.5 units counts as": {0: large, 1: _times(_power(unit - 1), -1.0)},
    }
    counted = [(each - 2.0**EXPONENT) * 2.0**-unit for each in sums(product, list(beside.values()))]
    small = _power(-bits)
    (square,) = sums(product, [{0: (1.75, 1.75), 1: small, 2: small}])
    return {
        "fraction bits below the largest addend": str(bits),
        **{name: f"{value:g} units" for name, value in zip(beside, counted)},
        f"1.75^2 + 2^-{bits} + 2^-{bits} is 1.75^2 plus": f"{(square - 1.75**2) * 2.0**bits:g} x 2^-{bits}",
        f"addends at k = {CUT}, {CUT + 1} are cut by one at k =": _ranges(cutting_positions(product, bits)),
    }


def fraction_bits(product: Product) -> int:
    """Bits below the leading one of the largest addend that a smaller addend can change."""
    tried = range(1, EXPONENT + 10)
    found = sums(product, [{0: _power(EXPONENT), 1: _power(EXPONENT - bits)} for bits in tried])
    return max((bits for bits, value in zip(tried, found) if value > 2.0**EXPONENT), default=0)


def cutting_positions(product: Product, bits: int) -> list[int]:
    """Positions of a large addend that costs two addends of half a unit, at ``CUT`` and after it, their sum of a unit.

    They are lost if they meet the large addend before each other: in one group, or after it in the same accumulator.
    """
    half = _power(EXPONENT - bits - 1)
    positions = [at for at in range(LENGTH) if at not in (CUT, CUT + 1)]
    found = sums(product, [{CUT: half, CUT + 1: half, at: _power(EXPONENT)} for at in positions])
    return [at for at, value in zip(positions, found) if value == 2.0**EXPONENT]


def _power(exponent: int) -> tuple[float, float]:
    """Two E4M3 numbers whose product is 2^exponent, from -18 to 16."""
    first = max(-9, min(8, exponent // 2))
    return 2.0**first, 2.0 ** (exponent - first)


def _times(factors: tuple[float, float], number: float) -> tuple[float, float]:
    return factors[0] * number, factors[1]


def _ranges(positions: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; the small addends' own positions do not interrupt a range."""
    between = {CUT, CUT + 1} if {CUT - 1, CUT + 2} <= set(positions) else set()
    taken = {*positions, *between}
    starts = [at for at in positions if at - 1 not in taken]
    ends = [at for at in positions if at + 1 not in taken]
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(starts, ends)) or "none"
