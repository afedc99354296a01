"""MX operands of a group of matrices with as many columns: each as ``quantize/reference.py`` quantizes it alone."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import WHOLE, ShardSlice, draw_bits
from megatron_lowprec.kernels.quantize.reference import quantize_operand, uniform_from_bits
from megatron_lowprec.kernels.quantize.rule import MxRule


def scaled_signs_of_groups(keys: Sequence[Key], rng_step: torch.Tensor, group: int) -> torch.Tensor:
    """fp32 [keys, group]: random signs times fl32(1/sqrt(group)), a row of them for each key.

    Args:
        keys: Philox keys.
        rng_step: int32 [2], (step, microbatch), on the device of the result.
    """
    on_host = int(rng_step[0]), int(rng_step[1])
    bits = torch.cat([draw_bits(_words(key), on_host, 1, group, device=rng_step.device) for key in keys])
    return (1.0 - 2.0 * (bits >> 15).to(torch.float32)) * group**-0.5


def quantize_mx_groups(
    sources: Sequence[torch.Tensor],
    rule: MxRule,
    *,
    columnwise: bool,
    keys: Sequence[Key],
    signs: torch.Tensor | None = None,
    rng_step: torch.Tensor,
    spans: tuple[ShardSlice, ShardSlice] = (WHOLE, WHOLE),
) -> torch.Tensor:
    """Dequantized MX operands [sum of rows, N] of all sources, in their layout, one after the other.

    Rows of the random streams begin at 0 in each source, and so do blocks along rows.

    Args:
        sources: [M, N] each, bf16 or fp32, contiguous; any M, also 0. Rowwise, N is a multiple of 32 and of the signs.
        rule: format, scale and rounding.
        columnwise: blocks along the first dimension, instead of the last. With signs each source is padded with zeros
            to whole groups of rows, which the transform makes dense.
        keys: Philox key of stochastic rounding, of each source.
        signs: fp32 [sources, g] of +-1/sqrt(g) for the Hadamard transform, or None.
        rng_step: int32 [2], (step, microbatch), on the sources' device.
        spans: location of a source's rows and columns in its unsharded matrix.
    """
    on_host = int(rng_step[0]), int(rng_step[1])
    row_span, column_span = spans[::-1] if columnwise else spans
    operands = []
    for i, (source, key) in enumerate(zip(sources, keys, strict=True)):
        matrix, own = (source.t() if columnwise else source), None
        if signs is not None:
            matrix, own = pad(matrix, (0, -matrix.shape[1] % signs.shape[1])), signs[i].sign()
        if matrix.numel() == 0:
            operands.append(source)
            continue

        def uniform(rows: slice, key: Key = key, columns: int = matrix.shape[1]) -> torch.Tensor:
            spanned = {"row_span": row_span, "column_span": column_span, "first_row": rows.start}
            bits = draw_bits(_words(key), on_host, rows.stop - rows.start, columns, **spanned, device=rng_step.device)
            return uniform_from_bits(bits, rule.random_bits)

        quantized, _ = quantize_operand(
            matrix,
            rule.fmt,
            (1, rule.block),
            scale_format="e8m0",
            scale_rule=rule.scale_rule,
            rounding=rule.rounding,
            headroom=rule.headroom,
            signs=own,
            uniform=uniform,
            dequantize=True,
        )
        operands.append(quantized.t() if columnwise else quantized)
    return torch.cat(operands)


def _words(key: Key) -> tuple[int, int]:
    return key.word0 & 0xFFFFFFFF, key.word1 & 0xFFFFFFFF
