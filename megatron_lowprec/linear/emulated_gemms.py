"""GEMMs in the compute dtype on values of the formats' grids: the numerics of a format on any device, not its speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_lowprec.kernels.dispatch import add_bias_
from megatron_lowprec.kernels.gemm.reference import Operand, contract
from megatron_lowprec.kernels.quantize.reference import block_amax
from megatron_lowprec.linear.gemms import Gemm, LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.error_stats import error_stats
from megatron_lowprec.quantization.quantizer import (
    Reduce,
    delayed_encode_scale,
    quantize_both_ways,
    quantize_by_reference,
    quantize_for_gemm,
)
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import block_sizes
from megatron_lowprec.quantization.transform import Transform, Transforms
from megatron_lowprec.recipe.schema import QuantSpec, Recipe


class EmulatedGemms:
    """Operands and products of one layer, by the reference or by the fused MX kernel.

    Args:
        recipe: what to do.
        place: which layer this is.
        seed: the run's seed.
        histories: operand -> its amax history and slot, for operands with delayed scales.
        reduce_amax: maximum over the ranks that share ``place.split``; None without such ranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        place: LinearId,
        seed: int,
        histories: Mapping[str, tuple[AmaxHistory, int]],
        reduce_amax: Reduce | None,
    ) -> None:
        self._place, self._histories, self._reduce_amax = place, histories, reduce_amax
        self._gemms = {name: Gemm.of(name, gemm) for name, gemm in recipe.gemms.items()}
        self._rounding = place.rounding_streams(seed)
        hadamard = {name: gemm.hadamard for name, gemm in recipe.gemms.items()}
        self._transforms = Transforms(hadamard, place.sign_streams(seed))

    def quantize(
        self, gemm: str, operand: str, matrix: torch.Tensor, rng_step: RngStep, update_amax: bool = True
    ) -> Operand:
        """An operand of [R, K], contracted dimension last."""
        spec, transform = self._gemms[gemm].specs[operand], self.transform(gemm, rng_step)
        if spec is None or matrix.numel() == 0:  # an expert may get no tokens
            return Operand(matrix if transform is None else transform.apply(matrix).to(matrix.dtype))
        if spec.scaling == "delayed" and update_amax:
            history, slot = self._histories[operand]
            history.update_amax(slot, block_amax(matrix, block_sizes(spec, matrix)))
        elements, scale = quantize_for_gemm(matrix, spec, **self._arguments(gemm, operand, spec, rng_step))
        return Operand(elements, scale, block_sizes(spec, matrix))

    def quantize_grad_output(self, dy_TO: torch.Tensor, rng_step: RngStep) -> dict[str, Operand]:
        """Operands of dgrad and wgrad from one read of dy; none where specs differ or no kernel makes both."""
        spec = self._gemms["dgrad"].specs["grad_output"]
        if spec is None or spec != self._gemms["wgrad"].specs["grad_output"]:
            return {}
        both = quantize_both_ways(
            dy_TO,
            spec,
            (self._rounding["dgrad", "grad_output"], self._rounding["wgrad", "grad_output"]),
            (self.transform("dgrad", rng_step), self.transform("wgrad", rng_step)),
            rng_step,
        )
        return {} if both is None else {"dgrad": Operand(both[0]), "wgrad": Operand(both[1])}

    def gemm(
        self,
        name: str,
        left: Operand,
        right: Operand,
        out_dtype: torch.dtype,
        accumulate_into: torch.Tensor | None = None,
        overwrite: bool = False,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``left @ right.T`` of a GEMM's operands; the bias is added after rounding, as Megatron-core's layers do."""
        y = contract(
            left,
            right,
            alpha=self._gemms[name].alpha,
            out_dtype=out_dtype,
            accumulate_into=accumulate_into,
            overwrite=overwrite,
        )
        return y if bias is None else add_bias_(y, bias)

    def error_stats(self, gemm: str, operand: str, matrix: torch.Tensor, rng_step: RngStep) -> torch.Tensor:
        """``quantization.error_stats`` of an operand as ``quantize`` makes it, without a trace in histories or draws.

        Ranks that share the operand's scale must all call it.

        Args:
            matrix: [R, K], contracted dimension last, not empty; of an operand that the recipe quantizes.
        """
        spec = self._gemms[gemm].specs[operand]
        assert spec is not None
        return error_stats(*quantize_by_reference(matrix, spec, **self._arguments(gemm, operand, spec, rng_step)))

    def transform(self, gemm: str, rng_step: RngStep) -> Transform | None:
        """The GEMM's Hadamard transform at this step."""
        return self._transforms.at(gemm, rng_step)

    def _arguments(self, gemm: str, operand: str, spec: QuantSpec, rng_step: RngStep) -> dict[str, Any]:
        """Arguments of a quantizer beside the matrix and the spec."""
        encode_scale = None
        if spec.scaling == "delayed":
            history, slot = self._histories[operand]
            encode_scale = delayed_encode_scale(history.in_effect[slot], spec)
        return {
            "random": self._rounding[gemm, operand],
            "rng_step": rng_step,
            "transform": self.transform(gemm, rng_step),
            "encode_scale": encode_scale,
            "reduce_amax": self._reduce_amax if self._place.shares_scale(gemm, operand, spec) else None,
        }
