"""FP8 codes of a group of matrices, each as ``cast_fp8/reference.py`` casts it alone."""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from megatron_lowprec.kernels.cast_fp8 import reference
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Cast, Fp8Rule
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale

BLOCK = 128
BLOCKS = "1x128", "128x128"
"""Granularities whose blocks have entries of one matrix only, once its rows are padded."""


def padded_rows(rows: Sequence[int]) -> list[int]:
    """Rows of each group, rounded up to whole blocks."""
    return [-(-count // BLOCK) * BLOCK for count in rows]


def amax_of_groups(sources: Sequence[torch.Tensor], *, columns: bool = False) -> torch.Tensor:
    """Largest magnitude of each matrix, fp32 [groups], or of each of its columns, [groups, N].

    An empty matrix has 0. NaN propagates.
    """
    found = []
    for source in sources:
        rows, N = source.shape
        if not rows:
            found.append(torch.zeros(N if columns else 1, device=source.device))
        else:
            found.append(reference.amax_of(source, vectors=columns)[rows if columns else 0 :])
    return torch.stack(found) if columns else torch.cat(found)


def cast_fp8_groups(
    sources: Sequence[torch.Tensor],
    rule: Fp8Rule,
    *,
    amax: Sequence[torch.Tensor] | torch.Tensor | None = None,
    reduce_amax: Callable[[torch.Tensor], torch.Tensor] | None = None,
    observed: Sequence[torch.Tensor] | torch.Tensor | None = None,
    rowwise: bool,
    columnwise: bool,
) -> Fp8Cast:
    """Rowwise data, columnwise data or both of all matrices, one after the other, padded to whole blocks of 128 rows.

    Padding is zeros, times the matrix's scales. With blocks, data and scales are those of the padded rows as one
    matrix. The decode scales of a tensor are [groups], those of columns [groups, N]; a matrix without rows has 1.

    Args:
        sources: [M, N] each, bf16, contiguous; N a multiple of 16, of 128 with blocks; any M, also 0, but not
            for all; each begins at a multiple of 16 bytes.
        rule: granularity "tensor", "1x128" or "128x128"; or "row", for columnwise data only.
        amax: of each, from which its scales follow: fp32 [1], or [N] of its columns for "row"; or one tensor of all;
            None for ``amax_of_groups``, and with blocks.
        reduce_amax: returns the maximum over ranks of an amax that was None.
        observed: fp32 [1] of each, raised to the amax of its matrix if that is not empty, NaN as Inf; None with blocks.
    """
    padded = [pad(source, (0, 0, 0, -source.shape[0] % BLOCK)) for source in sources]
    if rule.granularity in BLOCKS:
        return reference.cast_fp8(torch.cat(padded), rule, rowwise=rowwise, columnwise=columnwise)
    of_columns = rule.granularity == "row"
    if amax is None:
        current = amax_of_groups(sources, columns=of_columns)
        amax = current if reduce_amax is None else reduce_amax(current)
    if isinstance(amax, torch.Tensor):
        amax = amax.unbind() if of_columns else amax.split(1)
    if isinstance(observed, torch.Tensor):
        observed = observed.split(1)
    by_rows, by_columns = [], []
    for i, source in enumerate(padded):
        if not source.numel():
            continue
        cast = reference.cast_fp8(
            source,
            rule,
            rowwise=rowwise,
            columnwise=columnwise,
            amax=torch.cat((amax[i].new_zeros(source.shape[0]), amax[i])) if of_columns else amax[i],
            observed=None if observed is None else observed[i],
        )
        by_rows.append(cast.rowwise_data)
        by_columns.append(cast.columnwise_data)
    amaxes = (torch.stack if of_columns else torch.cat)(list(amax))
    scale = 1 / fp32_encode_scale(amaxes, rule.fmt, rule.scale_rule, rule.amax_floor, rule.margin)
    scale[[not source.numel() for source in sources]] = 1
    return Fp8Cast(
        _joined(by_rows, 0) if rowwise else None,
        scale if rowwise else None,
        _joined(by_columns, 1) if columnwise else None,
        scale if columnwise else None,
    )


def _joined(codes: Sequence[torch.Tensor | None], dim: int) -> torch.Tensor:
    parts = [part for part in codes if part is not None]
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)
