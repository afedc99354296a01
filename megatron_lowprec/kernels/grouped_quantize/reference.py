"""MX operands of a group of matrices with as many columns: each as ``quantize/reference.py`` quantizes it alone."""

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.functional import pad

from megatron_lowprec.kernels.amax.reference import operand_amaxes
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import WHOLE, ShardSlice, draw_bits
from megatron_lowprec.kernels.quantize.reference import (
    decode,
    quantize_operand,
    scale_blocks,
    tensor_scale,
    uniform_from_bits,
)
from megatron_lowprec.kernels.quantize.rule import Direction, MxRule


def scaled_signs_of_groups(keys: Sequence[Key], rng_step: torch.Tensor, group: int) -> torch.Tensor:
    """fp32 [keys, group]: random signs times fl32(1/sqrt(group)), a row of them for each key.

    Args:
        keys: Philox keys.
        rng_step: int32 [2], (step, microbatch), on the device of the result.
    """
    on_host = int(rng_step[0]), int(rng_step[1])
    bits = torch.cat([draw_bits(_words(key), on_host, 1, group, device=rng_step.device) for key in keys])
    return (1.0 - 2.0 * (bits >> 15).to(torch.float32)) * group**-0.5


def amaxes_of_groups(
    sources: Sequence[torch.Tensor], rule: MxRule, *, columnwise: bool, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 [sources]: amax of each operand of ``quantize_mx_groups``, transformed; 0 of an empty one."""
    found = torch.zeros(len(sources), dtype=torch.float32, device=sources[0].device)
    for i, source in enumerate(sources):
        way = Direction(signs=None if signs is None else signs[i])
        if source.numel():
            rows, columns = (None, way) if columnwise else (way, None)
            amaxes = operand_amaxes(source, rows=rows, columns=columns, rounds_transform=rule.rounds_transform)
            found[i] = amaxes[int(columnwise)]
    return found


def quantize_mx_groups(
    sources: Sequence[torch.Tensor],
    rule: MxRule,
    *,
    columnwise: bool,
    keys: Sequence[Key],
    signs: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    scale_keys: Sequence[Key] | None = None,
    rng_step: torch.Tensor,
    spans: tuple[ShardSlice, ShardSlice] = (WHOLE, WHOLE),
    whole: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dequantized operands [sum of rows, N] of all sources, in their layout, one after the other.

    Rows of the random streams begin at 0 in each source, and so do blocks along rows.

    Args:
        sources: [M, N] each, bf16 or fp32, contiguous; any M, also 0. Rowwise, N is a multiple of the block and of the
            signs.
        rule: format, scale and rounding.
        columnwise: blocks along the first dimension, instead of the last. With signs each source is padded with zeros
            to whole groups of rows, which the transform makes dense.
        keys: Philox key of stochastic rounding, of each source.
        signs: fp32 [sources, g] of +-1/sqrt(g) for the Hadamard transform, or None.
        amax: fp32 [sources] for a rule with a tensor scale, as ``amaxes_of_groups``.
        scale_keys: Philox key of the stochastic rounding of scales, of each source.
        rng_step: int32 [2], (step, microbatch), on the sources' device.
        spans: location of a source's rows and columns in its unsharded matrix.
        whole: multiply values by the scale of their tensor too, which is rounded with the block's scale to fp32.
        out_dtype: of the operands; None for that of the sources.

    Returns:
        The operands, without the scales of tensors unless ``whole``, and these, fp32 [sources]; None without such a
        scale.
    """
    on_host = int(rng_step[0]), int(rng_step[1])
    row_span, column_span = spans[::-1] if columnwise else spans
    operands, of_tensors = [], torch.ones(len(sources), device=sources[0].device)
    for i, (source, key) in enumerate(zip(sources, keys, strict=True)):
        matrix, own = (source.t() if columnwise else source), None
        if signs is not None:
            matrix, own = pad(matrix, (0, -matrix.shape[1] % signs.shape[1])), signs[i].sign()
        if matrix.numel() == 0:
            operands.append(source.to(out_dtype or source.dtype))
            continue
        if own is not None and rule.rounds_transform:
            matrix, own = hadamard_transform(matrix, own).to(matrix.dtype), None
        of_tensor = None
        if rule.target is not None:
            assert amax is not None
            largest = rule.options.largest(rule.fmt)
            of_tensor = tensor_scale(amax[i].view(1, 1), rule.target, rule.scale_rule, largest=largest)
            of_tensors[i] = of_tensor.decode[0, 0]

        def uniform(rows: slice, key: Key = key, columns: int = matrix.shape[1]) -> torch.Tensor:
            spanned = {"row_span": row_span, "column_span": column_span, "first_row": rows.start}
            bits = draw_bits(_words(key), on_host, rows.stop - rows.start, columns, **spanned, device=rng_step.device)
            return uniform_from_bits(bits, rule.random_bits)

        times_tensor = whole and of_tensor is not None
        quantized, scale = quantize_operand(
            matrix,
            rule.fmt,
            (rule.block_rows, rule.block),
            scale_format="e8m0" if rule.scale_fmt is None else rule.scale_fmt.name,
            scale_rule=rule.scale_rule,
            rounding=rule.rounding,
            headroom=rule.headroom,
            of_tensor=of_tensor,
            signs=own,
            uniform=uniform,
            scale_rounding=rule.scale_rounding,
            scale_uniform=None if scale_keys is None else partial(uniform, key=scale_keys[i]),
            options=rule.options,
            dequantize=not times_tensor,
        )
        if of_tensor is not None and times_tensor:
            assert rule.scale_fmt is not None
            both = decode(scale, rule.scale_fmt) * of_tensor.decode
            quantized = scale_blocks(quantized.float(), both, (rule.block_rows, rule.block))
        quantized = quantized.to(out_dtype or source.dtype)
        operands.append(quantized.t() if columnwise else quantized)
    return torch.cat(operands), None if rule.target is None else of_tensors


def _words(key: Key) -> tuple[int, int]:
    return key.word0 & 0xFFFFFFFF, key.word1 & 0xFFFFFFFF
