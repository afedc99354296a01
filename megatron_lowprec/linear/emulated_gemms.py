"""GEMMs in the compute dtype on values of a format's grid: its numerics on any device, not its speed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.dispatch import add_bias_, fuses_mx, has_mx_kernel, load
from megatron_lowprec.kernels.gemm.reference import gemm
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.quantize.reference import block_amax
from megatron_lowprec.kernels.quantize.rule import Direction
from megatron_lowprec.linear.backend import gemm_operands
from megatron_lowprec.linear.layer_tensors import in_memory
from megatron_lowprec.linear.linear_id import SIDES, LayerAmax
from megatron_lowprec.quantization.device_rng_step import device_rng_step
from megatron_lowprec.quantization.error_stats import error_stats
from megatron_lowprec.quantization.quantizer import delayed_encode_scale, mx_rule, quantize_by_reference
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes
from megatron_lowprec.quantization.transform import Transform, Transforms
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, QuantSpec, Recipe


class EmulatedGemms:
    """``GemmBackend`` for any device; quantizes by the reference or by the fused MX kernel.

    Args:
        recipe: specs of all GEMMs.
        rounding: streams of stochastic rounding, by GEMM and tensor.
        transforms: Hadamard transforms of the GEMMs.
        layer_amax: amax histories, and the ranks that share scales.
    """

    def __init__(
        self,
        recipe: Recipe,
        rounding: Mapping[tuple[str, str], RandomStream],
        transforms: Transforms,
        layer_amax: LayerAmax,
    ) -> None:
        self._rounding, self._transforms, self._amax = rounding, transforms, layer_amax
        self._specs: dict[tuple[str, str], QuantSpec | None] = {
            (name, tensor): getattr(recipe.gemms[name], tensor)
            for name, tensors in GEMM_OPERANDS.items()
            for tensor in tensors
        }
        # divides the headroom of both operands out of the product
        self._alpha = {
            name: 1.0 / math.prod(spec.headroom for tensor in tensors if (spec := self._specs[name, tensor]))
            for name, tensors in GEMM_OPERANDS.items()
        }

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
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """As ``GemmBackend``; ignores ``amax`` and ``local_amax``, and returns no sums."""
        matrix = in_memory(matrix)
        by_row, by_column = SIDES[tensor]
        name = by_row if rowwise else by_column
        spec, transform = self._specs[name, tensor], self.transform(name, rng_step)
        made = QuantizedTensor(matrix.shape, matrix.dtype, spec)
        if spec is None or matrix.numel() == 0:  # an expert may get no tokens
            data = matrix if rowwise else matrix.t()
            data = data if transform is None else transform.apply(data).to(data.dtype)
        else:
            if spec.scaling == "delayed" and update_amax:
                history, slot = self._amax.histories[tensor]
                history.update_amax(slot, block_amax(matrix, block_sizes(spec, matrix)))
            if has_mx_kernel(matrix.device.type, spec.block, spec.scale_format) and matrix.stride(1) != 1:
                matrix = matrix.contiguous()
            group = transform.block if transform else 1
            if fuses_mx(matrix if rowwise else matrix.t(), spec.block, spec.scale_format, group):
                other = self.transform(by_column, rng_step) if rowwise and columnwise else transform
                columnwise = columnwise and (other.block if other else 1) == group
                stream = self._rounding[name, tensor]
                spans = (stream.row_span, stream.column_span)
                cast = load("quantize").quantize_mx(
                    matrix,
                    mx_rule(spec),
                    rows=self._direction(by_row, tensor, transform, matrix.device) if rowwise else None,
                    columns=self._direction(by_column, tensor, other, matrix.device) if columnwise else None,
                    rng_step=device_rng_step(rng_step, matrix.device),
                    spans=spans if rowwise else (spans[1], spans[0]),
                )
                made.rowwise_data, made.columnwise_data = cast.rowwise_data, cast.columnwise_data
                return made, None
            data, scale = quantize_by_reference(
                matrix if rowwise else matrix.t(),
                spec,
                transform=transform,
                dequantize=spec.power_of_two_scale,
                **self._arguments(name, tensor, spec, rng_step),
            )
            data = data.to(matrix.dtype)
            if not spec.power_of_two_scale:
                made.rowwise_scale, made.columnwise_scale = (scale, None) if rowwise else (None, scale)
        made.rowwise_data, made.columnwise_data = (data, None) if rowwise else (None, data)
        return made, None

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
        """As ``GemmBackend``; the bias is added after rounding, as Megatron-core's layers do."""
        a_data, a_scale, b_data, b_scale = gemm_operands(name, a, b)
        y = gemm(
            a_data,
            b_data,
            a_scale=a_scale,
            b_scale=b_scale,
            a_block=(1, 1) if a.spec is None else block_sizes(a.spec, a_data),
            b_block=(1, 1) if b.spec is None else block_sizes(b.spec, b_data),
            alpha=self._alpha[name],
            out_dtype=out_dtype,
            accumulate_into=accumulate_into,
            overwrite=overwrite,
        )
        return y if bias is None else add_bias_(y, bias)

    def error_stats(self, name: str, tensor: str, matrix: torch.Tensor, rng_step: RngStep) -> torch.Tensor:
        """``quantization.error_stats`` of a GEMM's operand; changes neither histories nor draws.

        All ranks that share the operand's scale must call it.

        Args:
            matrix: [R, K], contracted dimension last, not empty; the recipe must quantize the operand.
        """
        spec, transform = self._specs[name, tensor], self.transform(name, rng_step)
        assert spec is not None
        if transform is not None:
            matrix = transform.apply(matrix)
        data, scale = quantize_by_reference(matrix, spec, **self._arguments(name, tensor, spec, rng_step))
        return error_stats(matrix, QuantizedTensor(matrix.shape, matrix.dtype, spec, data, scale))

    def transform(self, name: str, rng_step: RngStep) -> Transform | None:
        """The GEMM's Hadamard transform at an RNG step."""
        return self._transforms.at(name, rng_step)

    def _direction(self, name: str, tensor: str, transform: Transform | None, device: torch.device) -> Direction:
        signs = None if transform is None else transform.scaled_signs(device)
        return Direction(Key.of(self._rounding[name, tensor].key), signs)

    def _arguments(self, name: str, tensor: str, spec: QuantSpec, rng_step: RngStep) -> dict[str, Any]:
        """Arguments of ``quantize_by_reference`` other than matrix, spec and transform."""
        encode_scale = None
        if spec.scaling == "delayed":
            history, slot = self._amax.histories[tensor]
            encode_scale = delayed_encode_scale(history.in_effect[slot], spec)
        return {
            "random": self._rounding[name, tensor].at(rng_step),
            "encode_scale": encode_scale,
            "reduce_amax": self._amax.reduction(name, tensor, spec),
        }
