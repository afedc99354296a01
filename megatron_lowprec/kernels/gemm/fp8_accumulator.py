"""GEMM on FP8 elements with the accumulator of Hopper's tensor cores: its bits in plain torch, not its speed.

The tensor cores add the products of ``group`` terms and the accumulator at once. All addends are aligned to the largest
exponent among them, lose the bits below ``fraction_bits`` of it, and are added exactly. The sum loses the bits below
``fraction_bits`` of its own exponent. Published probes of real GPUs agree on 13 fraction bits and truncation toward
zero: arXiv 2511.10909 (MMA-Sim, wgmma of E4M3 and E5M2, 32 terms), and arXiv 2412.19437, section 3.5.2, which counts
the leading bit and says 14.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_lowprec.formats import Format

Dropping = Literal["truncate", "floor", "nearest_even"]
_ROUND = {"truncate": torch.trunc, "floor": torch.floor, "nearest_even": torch.round}
_EXPONENT_FIELD = 0x7F800000
_SMALLEST_TOP = 2.0**-60  # below any product of FP8 numbers: a group of zeros then has a finite unit
_CHUNK = 1 << 22  # products at a time


@dataclass(frozen=True)
class Fp8Accumulator:
    """Arithmetic of an accumulator.

    Attributes:
        group: terms that are added at once, in the order of K.
        fraction_bits: bits kept below the leading one, of addends and of the sum.
        dropping: treatment of the bits below these, in addends: ``"truncate"`` toward zero, ``"floor"`` as a shift of
            two's complement, or ``"nearest_even"``. The sum is always truncated.
        promote: terms after which the sum is added to an fp32 sum and restarts from 0; None for never. CUTLASS and
            DeepGEMM promote every 128, as cuBLAS is said to do without fast accumulation.
    """

    group: int = 32
    fraction_bits: int = 13
    dropping: Dropping = "truncate"
    promote: int | None = None

    def __post_init__(self) -> None:
        # a product of two significands below 2 has two bits above the fraction
        bits = self.fraction_bits + 2 + self.group.bit_length()
        if bits > 24:
            raise ValueError(
                f"{self.group} terms of {self.fraction_bits} fraction bits sum to {bits} bits; fp32 holds 24 exactly"
            )


HOPPER = Fp8Accumulator()


def fp8_product(
    a: torch.Tensor, b: torch.Tensor, a_format: Format, b_format: Format, accumulator: Fp8Accumulator = HOPPER
) -> torch.Tensor:
    """``a @ b.T`` of elements, as ``fp8_dot`` sums them.

    Args:
        a: [M, K], values on the grid of ``a_format``, any floating-point dtype that holds them.
        b: [N, K], likewise.

    Returns:
        fp32 [M, N].
    """
    rows = max(1, _CHUNK // max(1, b.shape[0] * accumulator.group))
    parts = [fp8_dot(part.unsqueeze(1), b, a_format, b_format, accumulator) for part in a.split(rows)]
    return torch.cat(parts)


def fp8_dot(
    a: torch.Tensor, b: torch.Tensor, a_format: Format, b_format: Format, accumulator: Fp8Accumulator = HOPPER
) -> torch.Tensor:
    """Sums of a * b over the last dimension by ``accumulator``; an Inf or a NaN is that of the fp32 sum.

    Args:
        a: [..., K], values on the grid of ``a_format``, any floating-point dtype that holds them.
        b: [..., K], likewise; other dimensions are broadcast.

    Returns:
        fp32, of the broadcast dimensions.
    """
    a, b = a.to(torch.float32), b.to(torch.float32)
    tops = _power_of_two(a, a_format), _power_of_two(b, b_format)
    length, step = a.shape[-1], accumulator.promote or max(1, a.shape[-1])
    total = torch.zeros(torch.broadcast_shapes(a.shape[:-1], b.shape[:-1]), device=a.device)
    plain = torch.zeros_like(total)
    for start in range(0, length, step):
        sums = torch.zeros_like(total)
        for at in range(start, min(start + step, length), accumulator.group):
            k = slice(at, min(at + accumulator.group, start + step))
            products = a[..., k] * b[..., k]
            plain += products.sum(-1)
            sums = _add(sums, products, tops[0][..., k] * tops[1][..., k], accumulator)
        total += sums
    # Without reading on the host whether there is an Inf or a NaN: CUDA graphs could not capture that.
    return torch.where(plain.isfinite(), total, plain)


def _add(sums: torch.Tensor, products: torch.Tensor, powers: torch.Tensor, accumulator: Fp8Accumulator) -> torch.Tensor:
    """``sums`` [...] plus ``products`` [..., k], exact in fp32 and overwritten; ``powers`` aligns each product."""
    largest = torch.maximum(powers.amax(-1), _power_of_two(sums)).clamp(min=_SMALLEST_TOP)
    unit = largest * 2.0**-accumulator.fraction_bits
    drop = _ROUND[accumulator.dropping]
    total = (drop(products.div_(unit.unsqueeze(-1))).sum(-1) + drop(sums / unit)) * unit  # exact: see Fp8Accumulator
    kept = (_power_of_two(total) * 2.0**-accumulator.fraction_bits).clamp(min=_SMALLEST_TOP * _SMALLEST_TOP)
    return torch.trunc(total / kept) * kept


def _power_of_two(x: torch.Tensor, fmt: Format | None = None) -> torch.Tensor:
    """2^exponent of each number; subnormal numbers of ``fmt`` share its smallest exponent, and 0 gives 0."""
    power = (x.view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)
    return power if fmt is None else torch.where(x == 0, 0.0, power.clamp(min=2.0**fmt.min_exponent))
