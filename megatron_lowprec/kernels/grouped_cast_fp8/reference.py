"""FP8 codes of a group of matrices with a scale each: as ``cast_fp8/reference.py`` casts each alone, rows padded."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from megatron_lowprec.kernels.cast_fp8 import reference
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale

BLOCK = 128


class GroupedFp8Cast(NamedTuple):
    """FP8 codes of all matrices, one after the other, each padded with zeros to whole blocks of 128 rows.

    Attributes:
        rowwise_data: [padded rows, N], or None.
        columnwise_data: [N, padded rows], or None.
        scale: fp32 decode scales, [groups].
    """

    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    scale: torch.Tensor


def padded_rows(rows: Sequence[int]) -> list[int]:
    """Rows of each group, rounded up to whole blocks."""
    return [-(-count // BLOCK) * BLOCK for count in rows]


def amax_of_groups(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """fp32 [groups], the largest magnitude of each matrix; 0 of an empty one; NaN propagates."""
    found = [reference.amax_of(source, vectors=False) if source.numel() else torch.zeros(1) for source in sources]
    return torch.cat([amax.to(sources[0].device) for amax in found])


def cast_fp8_groups(
    sources: Sequence[torch.Tensor],
    rule: Fp8Rule,
    *,
    amax: Sequence[torch.Tensor],
    observed: Sequence[torch.Tensor] | None = None,
    rowwise: bool,
    columnwise: bool,
) -> GroupedFp8Cast:
    """Rowwise data, columnwise data or both of all matrices, with their decode scales.

    Args:
        sources: [M, N] each, bf16, contiguous; N a multiple of 16; any M, also 0.
        rule: granularity "tensor".
        amax: fp32 [1] of each, from which its scale follows.
        observed: fp32 [1] of each, raised to the amax of its matrix if that is not empty, NaN as Inf.
    """
    by_rows, by_columns = [], []
    for i, source in enumerate(sources):
        if not source.numel():
            continue
        cast = reference.cast_fp8(
            source,
            rule,
            rowwise=True,
            columnwise=False,
            amax=amax[i],
            observed=None if observed is None else observed[i],
        )
        assert cast.rowwise_data is not None
        codes = pad(cast.rowwise_data.view(torch.uint8), (0, 0, 0, -source.shape[0] % BLOCK))
        by_rows.append(codes.view(rule.dtype))
        by_columns.append(codes.t().contiguous().view(rule.dtype))
    encode = fp32_encode_scale(torch.cat(list(amax)), rule.fmt, rule.scale_rule, rule.amax_floor, rule.margin)
    return GroupedFp8Cast(
        torch.cat(by_rows) if rowwise else None,
        torch.cat([codes.view(torch.uint8) for codes in by_columns], dim=1).view(rule.dtype) if columnwise else None,
        torch.ones_like(encode) / encode,
    )
