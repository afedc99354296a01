"""Quantization error of an operand, as sums that add up over ranks and layers."""

import math
from dataclasses import dataclass

import torch
from torch.linalg import vector_norm

from megatron_lowprec.kernels.chunks import row_chunks
from megatron_lowprec.kernels.quantize.reference import scale_blocks
from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes

COUNTS = 8
# Entries of a chunk, with five fp32 temporaries and one fp64. On a GPU, smaller chunks are bound by launches.
_CHUNK, _GPU_CHUNK = 1 << 20, 1 << 22
# An fp32 scale and its reciprocal are rounded, so an amax may exceed the largest value by this factor.
_SLACK = 1.0 + 2.0**-20


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
    """

    entries: int
    amax: float
    snr: float | None
    bias: float | None
    underflow: float
    saturation: float

    @staticmethod
    def of(sums: torch.Tensor) -> "QuantizationError":
        """From reduced ``error_stats``: the first seven summed, the last one's maximum; at least one entry."""
        entries, nonzero, underflows, saturated, energy, error, projection, amax = sums.tolist()
        whole = math.isfinite(energy) and math.isfinite(error) and math.isfinite(projection) and energy > 0
        return QuantizationError(
            int(entries),
            amax,
            10 * math.log10(energy / error) if whole and error > 0 else None,
            projection / energy - 1 if whole else None,
            underflows / nonzero if nonzero else 0.0,
            saturated / entries,
        )


def error_stats(matrix: torch.Tensor, quantized: QuantizedTensor) -> torch.Tensor:
    """float64 [COUNTS]: entries, nonzero, underflows, saturated, sum x^2, sum (q - x)^2, sum q x, amax.

    Args:
        matrix: [R, K], the source of the rounding, after any transform.
        quantized: the quantized matrix, with rowwise data.
    """
    spec, decode, data = quantized.spec, quantized.decode_scale, quantized.rowwise_data
    assert spec is not None
    assert data is not None
    block, limit = block_sizes(spec, matrix), quantized.format.max
    shared = decode.shape[0] == 1
    block_rows = 1 if shared else block[0]
    total = torch.zeros(COUNTS, dtype=torch.float64, device=matrix.device)
    chunk = _GPU_CHUNK if matrix.is_cuda else _CHUNK
    for rows in row_chunks(matrix.shape[0], matrix.shape[1], matrix.device, block_rows, chunk):
        x, grid = (part[rows].float() for part in (matrix, data))
        scales = decode if shared else decode[rows.start // block_rows :][: -(-len(x) // block_rows)]
        q = scale_blocks(grid, scales, block) / spec.headroom
        magnitude = x.abs()
        reach = scale_blocks(torch.full_like(grid, limit * _SLACK / spec.headroom), scales, block)
        energy, of_q, error = (vector_norm(part, dtype=torch.float64).square() for part in (x, q, q - x))
        parts = (
            x.count_nonzero(),
            ((q == 0) & (x != 0)).sum(),
            (magnitude > reach).sum(),
            energy,
            error,
            (energy + of_q - error) / 2,
        )
        total[1:-1] += torch.stack([part.double() for part in parts])
        total[-1] = torch.maximum(total[-1], magnitude.max())
    total[0] = matrix.numel()
    return total
