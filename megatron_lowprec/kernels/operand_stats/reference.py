"""Statistics of the rounding of an operand: sums and maxima that combine over blocks, layers and ranks."""

import torch
from torch.linalg import vector_norm
from torch.nn.functional import pad

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.chunks import row_chunks
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.elements import unpacked
from megatron_lowprec.kernels.quantize.reference import block_amax, decode, e8m0_decode_scale, scale_blocks

SUMS, MAXIMA = 7, 3
"""Leading entries of ``operand_stats`` that add up, and those after them of which the maximum counts."""

# An fp32 scale and its reciprocal are rounded, so an amax may exceed the largest value by this factor.
SLACK = 1.0 + 2.0**-20
# Entries of a chunk, with five fp32 temporaries and one fp64. On a GPU, smaller chunks are bound by launches.
_CHUNK, _GPU_CHUNK = 1 << 20, 1 << 22


def operand_stats(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    fmt: Format | None,
    block: tuple[int, int] = (1, 1),
    headroom: float = 1.0,
    signs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums and maxima over an operand x and its quantized values q = data * decode scale / headroom.

    Args:
        x: [R, K], source of the rounding, contracted dimension last; bf16 or fp32, any strides.
        data: [R, K] or larger: values of the format's grid; or codes of ``encode``, of 4-bit formats two a byte, the
            first in the low bits. After a transform K is padded to whole blocks of it.
        scale: decode scales as fp32 or E8M0 bytes, [ceil(R / rows), ceil(K / columns)] or larger, any strides. None,
            and no format either: data are numbers in any dtype, which do not saturate.
        block: (rows, columns) that share a scale.
        headroom: factor that multiplied x before the rounding.
        signs: [g] of +1 and -1: the Hadamard transform of x was rounded.

    Returns:
        float64 [SUMS + MAXIMA]: entries, nonzero x, zero q of them, x beyond the format's maximum under their scale,
        sum x^2, sum (q - x)^2, sum q x; amax (NaN if x has one), largest and largest reciprocal decode scale of blocks
        that are finite and not zero, 0 without any.
    """
    rows, columns = x.shape
    columns += 0 if signs is None else -columns % signs.numel()
    has_scale = scale is not None
    if scale is None:
        scale, block = torch.ones((1, 1), device=x.device), (rows, columns)
    largest = torch.inf if fmt is None else fmt.max
    one_scale = scale.shape[0] == 1
    decoder = scale if scale.is_floating_point() else e8m0_decode_scale(scale)
    decoder = decoder[: -(-rows // block[0]), : -(-columns // block[1])]
    total = torch.zeros(SUMS + MAXIMA, dtype=torch.float64, device=x.device)
    chunk_size = _GPU_CHUNK if x.is_cuda else _CHUNK
    for chunk in row_chunks(rows, columns, x.device, 1 if one_scale else block[0], chunk_size):
        part = x[chunk].float()
        if signs is not None:
            part = hadamard_transform(pad(part, (0, columns - x.shape[1])), signs)
        here = (len(part), block[1]) if one_scale else block
        scales = decoder if one_scale else decoder[chunk.start // block[0] :][: -(-len(part) // block[0])]
        grid = _values(data[chunk], fmt)[:, :columns]
        q = scale_blocks(grid, scales, here) / headroom
        reach = scale_blocks(torch.full_like(part, largest * SLACK / headroom), scales, here)
        energy, of_q, error = (vector_norm(each, dtype=torch.float64).square() for each in (part, q, q - part))
        sums = (
            part.count_nonzero(),
            ((q == 0) & (part != 0)).sum(),
            ((part.abs() > reach) & (reach > 0)).sum(),  # a coded scale may be zero
            energy,
            error,
            (energy + of_q - error) / 2,
        )
        total[1:SUMS] += torch.stack([each.double() for each in sums])
        amax = block_amax(part, here)
        counted = torch.where((amax != 0) & (scales != 0) & scales.isfinite(), scales.double(), torch.nan)
        maxima = [amax.amax().double()]
        maxima += [each.nan_to_num(nan=0.0).amax() * has_scale for each in (counted, 1.0 / counted)]
        total[SUMS:] = torch.maximum(total[SUMS:], torch.stack(maxima))
    total[0] = rows * columns
    return total


def _values(data: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    """fp32 values of the format's grid."""
    if fmt is None or data.is_floating_point():
        return data.float()
    if fmt.bits == 4:
        data = unpacked(data)
    return decode(data, fmt)
