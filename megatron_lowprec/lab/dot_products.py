"""Dot products of quantized vectors, their accumulators, and the SNR of the results.

Vectors are rows: [N, K] holds N vectors of length K, and the n-th product is that of the n-th rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lowprec.formats import FORMATS, Format
from megatron_lowprec.kernels.gemm.fp8_accumulator import Fp8Accumulator, fp8_dot
from megatron_lowprec.kernels.quantize.reference import block_amax, round_to_format
from megatron_lowprec.lab.experiment import Lab
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.quantization.tensor import decode_scales
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.quant_spec import QuantSpec
from megatron_lowprec.recipe.schema import HadamardSpec

Rounding = Callable[[torch.Tensor], torch.Tensor]
_FP32_MAX = torch.finfo(torch.float32).max


# ---- operands
def correlated_vectors(
    lab: Lab, count: int, length: int, correlation: float, sd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 [count, length] of normal entries with standard deviation ``sd`` and ``correlation`` between rows."""
    first, second = (lab.normal(f"{name} {length}", count, length) for name in "ab")
    mixed = correlation * first + (1.0 - correlation**2) ** 0.5 * second
    return (sd * first).float(), (sd * mixed).float()


@dataclass(frozen=True)
class Scheme:
    """Quantization of both operands.

    Attributes:
        spec: None keeps the operands in fp32.
        encode_scale: one fixed encode scale for all vectors, instead of the scale of the spec.
    """

    spec: QuantSpec | None
    encode_scale: float | None = None
    hadamard: HadamardSpec | None = None


class ScaledVectors(NamedTuple):
    """Vectors as elements times a scale.

    Attributes:
        elements: fp32 [N, K] on the format's grid.
        scale: fp32 decode scale, headroom divided out, [N, blocks along K]; one scale of all vectors is [1, 1].
    """

    elements: torch.Tensor
    scale: torch.Tensor

    def values(self) -> torch.Tensor:
        """fp32 [N, K]: elements times their scale."""
        blocks = self.elements.reshape(len(self.elements), self.scale.shape[1], -1)
        return (blocks * self.scale.unsqueeze(-1)).reshape(self.elements.shape)


def transformed(lab: Lab, scheme: Scheme, x: torch.Tensor) -> torch.Tensor:
    """``x`` [N, K] behind the scheme's Hadamard transform, which keeps products: what ``quantized_vectors`` rounds."""
    return x if scheme.hadamard is None else Transform(scheme.hadamard, lab.stream("")).apply(x)


def quantized_vectors(lab: Lab, scheme: Scheme, x: torch.Tensor, operand: str) -> ScaledVectors:
    """``x`` [N, K] by a scheme; ``operand`` names the stream of stochastic rounding, which operands must not share.

    A tensor scale is that of each vector, but where blocks span several: then it is that of all.
    """
    if scheme.spec is None:
        return ScaledVectors(x, torch.ones(1, 1, device=x.device))
    given = None if scheme.encode_scale is None else torch.full((1, 1), scheme.encode_scale, device=x.device)
    x, group = transformed(lab, scheme, x), None if scheme.hadamard is None else scheme.hadamard.block
    of_vectors, rows = None, 1 if scheme.spec.block is None else scheme.spec.block[0]
    if scheme.spec.tensor_scale is not None and scheme.spec.outer_block is None and rows == 1:
        of_vectors = block_amax(x, (1, x.shape[1]))
    random = lab.stream(operand)
    made = quantize_by_reference(x, scheme.spec, random, None, given, tensor_amax=of_vectors, group=group)
    scale = decode_scales(scheme.spec, made.scale, made.tensor_scale).repeat_interleave(rows, 0)[: len(x)]
    return ScaledVectors(made.data, scale / scheme.spec.headroom)


def quantized_pair(lab: Lab, scheme: Scheme, a: torch.Tensor, b: torch.Tensor) -> tuple[ScaledVectors, ScaledVectors]:
    """Both operands by a scheme, with signs in common and independent rounding."""
    return quantized_vectors(lab, scheme, a, "input"), quantized_vectors(lab, scheme, b, "weight")


# ---- accumulators
@dataclass(frozen=True)
class Accumulator:
    """A running sum of ``bits`` significand bits, rounded to nearest after each addition.

    Attributes:
        bits: leading one included; None for exact sums (float64).
        promote: length of a partial sum, which is then added in float64; None for one sum.
    """

    bits: int | None = None
    promote: int | None = None

    def rounding(self) -> Rounding:
        """Rounding of the running sum, fp32 to fp32."""
        assert self.bits is not None
        fmt = Format("accumulator", 8, self.bits - 1, 127, _FP32_MAX, "ieee", "")
        return lambda total: round_to_format(total, fmt, "nearest_even")


EXACT = Accumulator()


def dot(a: ScaledVectors, b: ScaledVectors, accumulator: Accumulator | Fp8Accumulator = EXACT) -> torch.Tensor:
    """float64 [N] products; scales multiply partial sums, as in a GEMM.

    Partial sums end at ``accumulator.promote`` entries and at the ends of blocks that share a scale. An
    ``Fp8Accumulator`` needs elements in E4M3.
    """
    count, length = a.elements.shape
    blocks = max(a.scale.shape[1], b.scale.shape[1])
    step = min(accumulator.promote or length, length // blocks)
    of_a, of_b = a.elements.reshape(-1, step), b.elements.reshape(-1, step)
    if isinstance(accumulator, Fp8Accumulator):
        sums = fp8_dot(of_a, of_b, FORMATS["e4m3"], FORMATS["e4m3"], accumulator).double()
    elif accumulator.bits is None:
        sums = (of_a.double() * of_b.double()).sum(1)
    else:
        sums = running_sum(of_a * of_b, accumulator.rounding()).double()
    scale = (a.scale.double() * b.scale.double()).expand(count, -1)
    return (sums.reshape(count, scale.shape[1], -1).sum(2) * scale).sum(1)


def running_sum(terms: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """fp32 [N] sums of [N, K], term after term, rounded after each addition in fp32."""
    total = torch.zeros(len(terms), device=terms.device)
    for term in terms.t().contiguous():
        total = rounding(total + term)
    return total


# ---- SNR
def expected_snr(pair: tuple[ScaledVectors, ScaledVectors], a: torch.Tensor, b: torch.Tensor) -> float:
    """Energy SNR in dB of products of independent entries with mean 0, from only second moments of the entries.

    With q and r the quantized a and b, E (q r - a b)^2 = E q^2 E r^2 - 2 E qa E rb + E a^2 E b^2 for each term, and the
    terms' errors are uncorrelated.
    """
    moments = []
    for quantized, x in zip(pair, (a.double(), b.double())):
        q = quantized.values().double()
        moments.append(torch.stack([(q * q).mean(), (q * x).mean(), (x * x).mean()]))
    of_q, of_both, of_x = moments[0] * moments[1]
    return float(10.0 * torch.log10(of_x / (of_q - 2.0 * of_both + of_x)))


def energy_snr(signal: torch.Tensor, result: torch.Tensor) -> float:
    """10 log10(sum signal^2 / sum error^2) over all products, in dB; Inf without error."""
    return float(10.0 * torch.log10(signal.square().sum() / (result - signal).square().sum()))


def sample_snr(signal: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """float64 [N]: 20 log10(|signal| / |error|) of each product, in dB; Inf without error."""
    return 20.0 * torch.log10(signal.abs() / (result - signal).abs())


def snr_row(signal: torch.Tensor, result: torch.Tensor) -> dict[str, float]:
    """Energy SNR; 5th, 50th and 95th percentile of the samples' SNR in dB; share below 0 dB; rms error."""
    samples = sample_snr(signal, result).cpu()
    marks = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    low, median, high = torch.quantile(samples, marks, interpolation="nearest").tolist()
    below = float((samples < 0).double().mean())
    spread = {"low": low, "median": median, "high": high, "below": below}
    error = float((result - signal).square().mean().sqrt())
    return {"energy": energy_snr(signal, result), **spread, "error": error}
