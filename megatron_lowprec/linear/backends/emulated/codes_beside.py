"""Input of wgrad from codes of fprop's values, which the cast for fprop writes beside its operand."""

from __future__ import annotations

import torch

from megatron_lowprec.kernels.quantize.rule import CodedMatrix, MxCast
from megatron_lowprec.linear.backends.emulated.cast_plan import CastPlans
from megatron_lowprec.linear.backends.protocol import GemmBackend
from megatron_lowprec.quantization.quantizer import mx_rule
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
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
        specs, plans: of the backend.
    """

    can_save_codes: bool
    specs: dict[tuple[str, str], QuantSpec | None]
    plans: CastPlans

    def saves_codes(self, x_TI: torch.Tensor) -> bool:
        """As ``GemmBackend``: where the MX kernel quantizes."""
        return self.can_save_codes and x_TI.stride(1) == 1 and self.plans.of("input", x_TI).rule is not None

    def requantize(self, x: QuantizedTensor, rng_step: RngStep) -> QuantizedTensor:
        """As ``GemmBackend``."""
        (codes, scale), of_tensor = x.rowwise(), x.rowwise_tensor_scale
        assert scale is not None
        assert of_tensor is not None
        plan = self.plans.of("input", codes, False, True)
        cast = plan.cast(CodedMatrix(codes, scale, of_tensor), rng_step, out_dtype=x.dtype)
        return plan.quantized(x, self.specs["wgrad", "input"], cast)
