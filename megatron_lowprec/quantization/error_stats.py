"""Quantization error of an operand, from statistics that combine over ranks and layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lowprec.kernels.dispatch import operand_stats
from megatron_lowprec.kernels.operand_stats.reference import MAXIMA, SUMS
from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes, decode_scales

COUNTS = SUMS + MAXIMA


@dataclass(frozen=True)
class QuantizationError:
    """Error of the dequantized values q of a matrix x, headroom divided out.

    Attributes:
        entries: number of rounded entries, counting the copies on every rank and the padding of a transform.
        amax: largest magnitude in x; after the reduction over ranks Inf where an entry is not finite.
        snr: 10 log10(sum x^2 / sum (q - x)^2), in dB; None without error, or where a sum is not finite.
        bias: relative gain error, sum q x / sum x^2 - 1; near 0 for unbiased rounding. None if a sum is not finite.
        underflow: share of the nonzero entries with q = 0.
        saturation: share of all entries beyond the format's largest value under their scale.
        mse: sum (q - x)^2 / entries; None if the sum is not finite.
        scale_inv_min, scale_inv_max: smallest and largest decode scale of the blocks that are finite and not zero; None
            without any. TransformerEngine's name of the reciprocal of the encode scale.
    """

    entries: int
    amax: float
    snr: float | None
    bias: float | None
    underflow: float
    saturation: float
    mse: float | None = None
    scale_inv_min: float | None = None
    scale_inv_max: float | None = None

    @staticmethod
    def of(stats: Sequence[float]) -> "QuantizationError":
        """From ``operand_stats`` as numbers, of which the first SUMS may be sums and the others maxima of several."""
        entries, nonzero, underflows, saturated, energy, error, projection, amax, largest, reciprocal = stats
        whole = math.isfinite(energy) and math.isfinite(error) and math.isfinite(projection) and energy > 0
        return QuantizationError(
            int(entries),
            amax,
            10 * math.log10(energy / error) if whole and error > 0 else None,
            projection / energy - 1 if whole else None,
            underflows / nonzero if nonzero else 0.0,
            saturated / entries,
            error / entries if math.isfinite(error) else None,
            1 / reciprocal if reciprocal else None,
            largest or None,
        )


def error_stats(
    matrix: torch.Tensor, quantized: QuantizedTensor, *, columnwise: bool = False, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """``operand_stats`` of a matrix and one direction of its quantized data, float64 [COUNTS].

    Args:
        matrix: [M, N], the source of the rounding.
        quantized: with data of that direction and its decode scales.
        columnwise: the data are those of the transpose.
        signs: signs of the Hadamard transform that the data are rounded from; None without one.
    """
    data, scale = quantized.columnwise() if columnwise else quantized.rowwise()
    of_tensor = quantized.columnwise_tensor_scale if columnwise else quantized.rowwise_tensor_scale
    assert quantized.spec is not None
    assert scale is not None, "scales are multiplied into the data"
    if quantized.spec.scale_format not in ("fp32", "e8m0"):
        scale = decode_scales(quantized.spec, scale, of_tensor)
    source = matrix.t() if columnwise else matrix
    return operand_stats(
        source, data, scale, quantized.format, block_sizes(quantized.spec, source), quantized.spec.headroom, signs
    )


def output_stats(exact: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Statistics of a GEMM's output in the layout of ``operand_stats``, float64 [COUNTS]; no saturation, no scales.

    Args:
        exact: fp32, product of the unquantized operands.
        output: the GEMM's output of the same shape, in any dtype.
    """
    return operand_stats(exact, output, None, None)
