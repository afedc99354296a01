"""From a spec to operands of native FP8 products."""

from functools import lru_cache

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.kernels.cast_fp8.source import Fp8Cast, Source
from megatron_lowprec.quantization.quantizer import Reduce
from megatron_lowprec.recipe.schema import QuantSpec


@lru_cache(maxsize=64)
def _rule_of(spec: QuantSpec) -> Fp8Rule:
    return Fp8Rule(FORMATS[spec.format], spec.tile, spec.scale_rule, spec.amax_floor, spec.margin)


def cast_for_gemms(
    matrix: torch.Tensor | Source,
    spec: QuantSpec,
    *,
    rows: bool,
    columns: bool,
    amax: torch.Tensor | None = None,
    observed: torch.Tensor | None = None,
    reduce_rows: Reduce | None = None,
    reduce_columns: Reduce | None = None,
    sums: bool = False,
) -> Fp8Cast:
    """FP8 operands of a matrix along its rows, its columns or both, from one read; two where the scale is current.

    Args:
        matrix: [M, N] bf16 or fp32 on a GPU; a computed one only with its ``amax``, for tile "tensor";
            in parts not for tile "row".
        spec: of both directions.
        amax: fp32 [1] of tile "tensor", where it is known already.
        observed: fp32 [1] of a history, raised to the matrix's amax.
        reduce_rows, reduce_columns: maximum over the ranks that hold parts of the rows or columns, for tile "row"; of
            the tensor, either, for tile "tensor".
        sums: also sum over M.
    """
    from megatron_lowprec.kernels.cast_fp8.triton import amax_of, cast_fp8

    if isinstance(matrix, torch.Tensor) and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    if amax is None and spec.tile == "tensor":
        amax = amax_of(matrix, vectors=False)
        reduce = reduce_rows or reduce_columns
        amax = amax if reduce is None else reduce(amax)
    elif spec.tile == "row":
        amax = amax_of(matrix, vectors=True)
        parts = amax.split(matrix.shape)
        for part, reduce in zip(parts, (reduce_rows, reduce_columns), strict=True):
            if reduce is not None:
                part.copy_(reduce(part))
    return cast_fp8(matrix, _rule_of(spec), rows=rows, columns=columns, amax=amax, observed=observed, sums=sums)


def amax_for_gemms(matrix: torch.Tensor) -> torch.Tensor:
    """fp32 [1], the amax of a matrix on a GPU."""
    from megatron_lowprec.kernels.cast_fp8.triton import amax_of

    return amax_of(matrix if matrix.stride(1) == 1 else matrix.contiguous(), vectors=False)
