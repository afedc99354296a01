"""GEMMs on FP8 tensor cores: fused casts, torch's scaled products."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue, Fp8Cast
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.kernels.gemm.native import ScaledMatrix, scaled_product
from megatron_lowprec.linear.gemms import SIDES, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.quantizer import Reduce
from megatron_lowprec.recipe.schema import QuantSpec, Recipe


class NativeGemms:
    """Operands and products of one layer, for the GEMMs that the device has.

    Args:
        recipe: what to do.
        place: which layer this is.
        histories: operand -> its amax history and slot, for operands with delayed scales.
        reduce_amax: maximum over the ranks that share ``place.split``; None without such ranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        place: LinearId,
        histories: Mapping[str, tuple[AmaxHistory, int]],
        reduce_amax: Reduce | None,
    ) -> None:
        self._recipe, self._place, self._histories, self._reduce_amax = recipe, place, histories, reduce_amax
        self._fast = {name: gemm.fast_accumulation for name, gemm in recipe.gemms.items()}

    def cast(
        self,
        tensor: str,
        matrix: torch.Tensor | CastPrologue,
        *,
        rows: bool,
        columns: bool,
        update_amax: bool = True,
        amax: torch.Tensor | None = None,
        part_amax: torch.Tensor | None = None,
        sums: bool = False,
    ) -> Fp8Cast:
        """Operands of x, w or dy for the GEMMs that contract its rows and its columns, from one read.

        Args:
            tensor: "input", "weight" or "grad_output".
            amax, part_amax: fp32 [1] of a current scale, over all ranks that share it or over this rank's part.
            sums: also sum over rows.
        """
        by_row, by_column = SIDES[tensor]
        spec: QuantSpec = getattr(getattr(self._recipe, by_row if rows else by_column), tensor)
        observed = None
        if spec.scaling == "delayed":
            history, slot = self._histories[tensor]
            amax, newest = history.cells(slot)
            observed = newest if update_amax else None
        reduce_rows, reduce_columns = (
            self._reduce_amax if self._place.shares_scale(gemm, tensor, spec) else None for gemm in (by_row, by_column)
        )
        if part_amax is not None and amax is None:
            over_ranks = reduce_rows or reduce_columns
            amax = part_amax if over_ranks is None else over_ranks(part_amax)
        return cast_for_gemms(
            matrix,
            spec,
            rows=rows,
            columns=columns,
            amax=amax,
            observed=observed,
            reduce_rows=reduce_rows,
            reduce_columns=reduce_columns,
            sums=sums,
        )

    def quantize(self, gemm: str, operand: str, matrix: torch.Tensor, update_amax: bool = True) -> ScaledMatrix:
        """An operand of [R, K], contracted dimension last."""
        by_row = SIDES[operand][0] == gemm
        source = matrix if by_row else matrix.t()
        made = self.cast(operand, source, rows=by_row, columns=not by_row, update_amax=update_amax)
        quantized = made.rows if by_row else made.columns
        assert quantized is not None
        return quantized

    def weight_amax(self, w_OI: torch.Tensor) -> torch.Tensor | None:
        """fp32 [1] over the ranks that hold parts, where fprop and dgrad each make an operand by one current scale."""
        spec = self._recipe.fprop.weight
        if (
            spec is None
            or spec != self._recipe.dgrad.weight
            or (spec.granularity, spec.scaling) != ("tensor", "current")
        ):
            return None
        amax = amax_for_gemms(w_OI)
        return amax if self._reduce_amax is None else self._reduce_amax(amax)

    def gemm(
        self,
        name: str,
        left: ScaledMatrix,
        right: ScaledMatrix,
        out_dtype: torch.dtype,
        accumulate_into: torch.Tensor | None = None,
        overwrite: bool = False,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``left @ right.T`` of a GEMM's operands; the bias is added before rounding to bf16."""
        return scaled_product(
            left,
            right,
            out_dtype=out_dtype,
            fast_accumulation=self._fast[name],
            bias=bias,
            accumulate_into=accumulate_into,
            overwrite=overwrite,
        )


@lru_cache(maxsize=64)
def _rule_of(spec: QuantSpec) -> Fp8Rule:
    return Fp8Rule(FORMATS[spec.format], spec.granularity, spec.scale_rule, spec.amax_floor, spec.margin)


def cast_for_gemms(
    matrix: torch.Tensor | CastPrologue,
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
        matrix: [M, N] bf16 or fp32 on a GPU; a computed one only with its ``amax``, for granularity "tensor";
            in parts not for granularity "row".
        spec: of both directions.
        amax: fp32 [1] of granularity "tensor", where it is known already.
        observed: fp32 [1] of a history, raised to the matrix's amax.
        reduce_rows, reduce_columns: maximum over the ranks that hold parts of the rows or columns, for
            granularity "row"; of the tensor, either, for granularity "tensor".
        sums: also sum over M.
    """
    from megatron_lowprec.kernels.cast_fp8.triton import amax_of, cast_fp8

    if isinstance(matrix, torch.Tensor) and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    if amax is None and spec.granularity == "tensor":
        amax = amax_of(matrix, vectors=False)
        reduce = reduce_rows or reduce_columns
        amax = amax if reduce is None else reduce(amax)
    elif spec.granularity == "row":
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
