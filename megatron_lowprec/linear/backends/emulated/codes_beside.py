"""Input of wgrad from codes of fprop's values, which the cast for fprop writes beside its operand."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from megatron_lowprec.kernels.dispatch import fuses_mx, load
from megatron_lowprec.kernels.quantize.rule import CodedMatrix, Direction, MxCast
from megatron_lowprec.linear.backends.protocol import GemmBackend
from megatron_lowprec.quantization.device_rng_step import device_rng_step
from megatron_lowprec.quantization.quantizer import Reduce, mx_rule, with_amaxes
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor, quantized_direction
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.schema import LinearRecipe, QuantSpec


def codes_for_wgrad(recipe: LinearRecipe) -> bool:
    """Whether the MX kernel can write codes of fprop's x, of E2M1 with E4M3 scales, and quantize them for wgrad."""
    spec, again, transform = recipe.fprop.input, recipe.wgrad.input, recipe.wgrad.hadamard
    if spec is None or again is None or again.source != "fprop" or recipe.fprop.hadamard is not None:
        return False
    rule, of_wgrad = mx_rule(spec), mx_rule(again, transform)
    if rule is None or of_wgrad is None or again.tensor_scale is None or "delayed" in (spec.scaling, again.scaling):
        return False
    one_row = of_wgrad.block_rows == 1 and (transform is None or transform.block % of_wgrad.block == 0)
    return rule.makes_nvfp4 and one_row


def codes_beside(quantized: QuantizedTensor, cast: MxCast) -> QuantizedTensor | None:
    """``QuantizedTensor.beside`` of what a cast wrote; None without codes."""
    if cast.beside is None:
        return None
    codes, scale, of_tensor = cast.beside
    found = QuantizedTensor(quantized.shape, quantized.dtype, quantized.spec, codes, scale)
    found.rowwise_tensor_scale = of_tensor
    return found


class CodesBeside(GemmBackend):
    """``saves_codes`` and ``requantize`` of the emulated backend.

    Attributes:
        can_save_codes: ``codes_for_wgrad``, of operands that are values.
        specs, rounding: of the backend.
    """

    can_save_codes: bool
    specs: dict[tuple[str, str], QuantSpec | None]
    rounding: Mapping[tuple[str, str], RandomStream]

    def saves_codes(self, x_TI: torch.Tensor) -> bool:
        """As ``GemmBackend``: where the MX kernel quantizes."""
        spec = self.specs["fprop", "input"] if self.can_save_codes else None
        return spec is not None and x_TI.stride(1) == 1 and fuses_mx(x_TI, mx_rule(spec))

    def requantize(self, x: QuantizedTensor, rng_step: RngStep) -> QuantizedTensor:
        """As ``GemmBackend``."""
        place = "wgrad", "input"
        spec, stream, transform = self.specs[place], self.rounding[place], self.transform("wgrad", rng_step)
        (codes, scale), of_tensor = x.rowwise(), x.rowwise_tensor_scale
        assert spec is not None
        assert scale is not None
        assert of_tensor is not None
        rule = mx_rule(spec, None if transform is None else transform.spec)
        assert rule is not None
        matrix, way = CodedMatrix(codes, scale, of_tensor), self._direction(*place, transform, codes.device)
        cast: MxCast = load("quantize").quantize_mx(
            matrix,
            rule,
            **with_amaxes(matrix, rule, None, way, reduce_amax=self.reduction(*place)),
            rng_step=device_rng_step(rng_step, codes.device),
            spans=(stream.column_span, stream.row_span),
            out_dtype=x.dtype,
        )
        data, _, of_operand = cast.direction(False)
        assert data is not None
        return quantized_direction(x, spec, False, data, transform, None, of_operand)

    @abstractmethod
    def transform(self, name: str, rng_step: RngStep) -> Transform | None:
        """The GEMM's Hadamard transform at an RNG step."""

    @abstractmethod
    def reduction(self, name: str, tensor: str) -> Reduce | None:
        """Maximum over the ranks that share a current scale of an operand; None without such ranks."""

    @abstractmethod
    def _direction(self, name: str, tensor: str, transform: Transform | None, device: torch.device) -> Direction: ...
