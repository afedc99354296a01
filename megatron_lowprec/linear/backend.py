"""Protocol of the GEMM backends, and the dtypes in which they compute."""

from typing import Protocol

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import LinearRecipe

COMPUTE_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of the input, weight and output of a quantized layer."""


class GemmBackend(Protocol):
    """Quantizes the tensors of one layer and multiplies them; ``EmulatedGemms`` or ``NativeGemms``."""

    def quantize(
        self,
        tensor: str,
        matrix: torch.Tensor | CastPrologue,
        rng_step: RngStep,
        *,
        rowwise: bool,
        columnwise: bool,
        update_amax: bool = True,
        amax: torch.Tensor | None = None,
        local_amax: torch.Tensor | None = None,
        sums: bool = False,
        codes: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """Quantize x [T, I], w [O, I] or dy [T, O]; returns the quantized tensor and the sums or None.

        Args:
            tensor: "input", "weight" or "grad_output". ``SIDES`` lists the GEMMs that contract its rows and columns.
            rowwise, columnwise: directions to quantize, with one spec. Columnwise data next to rowwise data are
                written only if one read of the matrix gives both.
            update_amax: record the amax of a tensor with delayed scaling.
            amax, local_amax: fp32 [1] for a current scale, over all ranks that share it or over this rank's part; None
                if unknown.
            sums: also sum over rows, [columns], if the same read gives it.
            codes: return codes and scales, rowwise only, for ``from_codes`` of either backend; granularity "tensor",
                "row" or blocks of one row. Formats without an FP8 dtype of torch are values in the matrix's dtype.
        """

    def from_codes(self, quantized: QuantizedTensor, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Data and scale of this backend's operand, with the bits of ``quantize``.

        Args:
            quantized: rowwise codes [T, K] of ``quantize``.
            columnwise: of the transpose, for the GEMM that contracts tokens; granularity "tensor" only.
        """

    def gemm(
        self,
        name: str,
        a: QuantizedTensor,
        b: QuantizedTensor,
        out_dtype: torch.dtype,
        *,
        accumulate_into: torch.Tensor | None = None,
        overwrite: bool = False,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """fprop ``x @ w.T``, dgrad ``dy @ w`` or wgrad ``dy.T @ x`` of quantized tensors.

        Args:
            accumulate_into: fp32; add the product to it and return it.
            overwrite: write the product to ``accumulate_into`` instead of adding.
            bias: [O], added to the product of fprop.
        """


def gemm_operands(
    name: str, a: QuantizedTensor, b: QuantizedTensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Data and scale of a, then of b, contracted dimension last."""
    first = (a.columnwise_data, a.columnwise_scale) if name == "wgrad" else (a.rowwise_data, a.rowwise_scale)
    second = (b.rowwise_data, b.rowwise_scale) if name == "fprop" else (b.columnwise_data, b.columnwise_scale)
    return *first, *second  # type: ignore[return-value]


def check_dtype(recipe: LinearRecipe, dtype: torch.dtype, layer: str) -> None:
    """Raise UserError if a quantized layer was given a weight in fp16, whose range overflows, or one by autocast.

    fp64 passes: with it layouts are compared without the order of sums.
    """
    if recipe.quantized and dtype == torch.float16:
        raise UserError(
            f"{layer} under recipe {recipe.name} has a weight of {dtype}, by its own dtype or by autocast, but recipes "
            f"compute in bfloat16 or float32: use one of them"
        )
