"""Emulated GEMMs of a layer's experts on a GPU: one launch per operand and one per product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_lowprec.kernels.dispatch import load
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.linear.grouped.grouped_backend import GroupedBackend
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.device_rng_step import device_rng_step
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import mx_rule
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, QuantSpec


def has_grouped_kernels(spec: QuantSpec | None) -> bool:
    """Whether an operand is quantized for all experts in one launch: MX blocks of 32, or not at all."""
    return spec is None or (spec.block == (1, 32) and spec.scale_format == "e8m0" and spec.source == "original")


class GroupedEmulatedGemms(GroupedBackend):
    """The three GEMMs of a layer's experts, by kernels that take the experts' keys and addresses from a table.

    They run emulated MX, or unquantized operands, in bf16.
    """

    def __init__(self, experts: Sequence[LinearGemms]) -> None:
        super().__init__(experts)
        self._first = experts[0].emulated

    def fprop(
        self,
        x_TI: torch.Tensor | QuantizedTensor,
        tokens: Sequence[int],
        weights: Sequence[torch.Tensor],
        rng_step: RngStep,
        update_amax: bool,
    ) -> torch.Tensor:
        """``y = x @ w.T`` of each expert's rows, [T, O]; False for ``update_amax`` stores no weights in the cache."""
        x = self._tokens("fprop", "input", x_TI, tokens, rng_step)
        w = self._weights("fprop", weights, rng_step, update_amax)
        return self._product("fprop", x, w, tokens, x_TI.dtype)

    def dgrad(
        self,
        dy_TO: torch.Tensor | QuantizedTensor,
        tokens: Sequence[int],
        weights: Sequence[torch.Tensor],
        rng_step: RngStep,
    ) -> torch.Tensor:
        """``dx = dy @ w`` of each expert's rows, [T, I]."""
        dy = self._tokens("dgrad", "grad_output", dy_TO, tokens, rng_step)
        w = [one.t() for one in self._weights("dgrad", weights, rng_step)]
        return self._product("dgrad", dy, w, tokens, dy_TO.dtype)

    def wgrad(
        self,
        dy_TO: torch.Tensor,
        x_TI: torch.Tensor,
        tokens: Sequence[int],
        rng_step: RngStep,
        totals: Sequence[torch.Tensor],
        overwrite: Sequence[bool],
    ) -> None:
        """Adds ``dy.T @ x`` of each expert's rows to its total [O, I], or overwrites it."""
        dy = self._tokens("wgrad", "grad_output", dy_TO, tokens, rng_step)
        x = self._tokens("wgrad", "input", x_TI, tokens, rng_step)
        padding = self._padding("wgrad")
        rows = [-(-count // padding) * padding for count in tokens]
        load("grouped_gemm").grouped_wgrad_(dy, x, rows, totals, alpha=self._first.alpha["wgrad"], overwrite=overwrite)

    def _supports(self, name: str, weight: torch.Tensor) -> bool:
        if isinstance(weight, Fp8Weight) or weight.dtype != torch.bfloat16:
            return False
        gemms, specs = self._experts[0], [self._first.specs[name, tensor] for tensor in GEMM_OPERANDS[name]]
        transform = self._first.transforms.of(name)
        quantized = [spec is not None for spec in specs]
        if gemms.backend(name) is not gemms.emulated or not all(map(has_grouped_kernels, specs)):
            return False
        if name in gemms.emulated.products:
            return False
        if (any(quantized) or transform is not None) and not all(quantized):
            return False
        if transform is not None and transform[0].block < 32:
            return False
        # whole groups along features; along tokens the kernels pad
        group = max(32, self._padding(name)) if any(quantized) else 8
        return all(size % group == 0 for size in weight.shape)

    def _padding(self, name: str) -> int:
        """Rows to which an expert's operand along tokens is padded with zeros."""
        transform = self._first.transforms.of(name)
        return 1 if transform is None else transform[0].block

    def _tokens(
        self,
        name: str,
        tensor: str,
        matrix: torch.Tensor | QuantizedTensor,
        tokens: Sequence[int],
        rng_step: RngStep,
    ) -> torch.Tensor:
        """Operand of a GEMM for all experts, [rows, N]; along tokens each expert's rows are padded."""
        if isinstance(matrix, QuantizedTensor):
            return self._first.from_codes(matrix, columnwise=False)[0]
        if self._first.specs[name, tensor] is None:
            return matrix
        return self._quantized(name, tensor, matrix.split(list(tokens)), rng_step)

    def _weights(
        self, name: str, weights: Sequence[torch.Tensor], rng_step: RngStep, store: bool = True
    ) -> Sequence[torch.Tensor]:
        """Each expert's weight for a GEMM, [O, I]; from the first expert's cache if that holds them."""
        if self._first.specs[name, "weight"] is None:
            return weights
        cache = self._experts[0].weight_cache
        stacked = cache.get_group(name)
        if stacked is None:
            stacked = self._quantized(name, "weight", weights, rng_step).view(len(weights), -1, weights[0].shape[1])
            if store and cache.holds(name):
                cache.put_group(name, stacked)
        return stacked.unbind()

    def _quantized(self, name: str, tensor: str, sources: Sequence[torch.Tensor], rng_step: RngStep) -> torch.Tensor:
        spec, transform = self._first.specs[name, tensor], self._first.transforms.of(name)
        assert spec is not None
        op, device = load("grouped_quantize"), sources[0].device
        moment, signs = device_rng_step(rng_step, device), None
        if transform is not None:
            group = transform[0].block
            if transform[0].signs == "random":
                of_experts = [gemms.emulated.transforms.of(name) for gemms in self._experts]
                keys = [Key.of(found[1].key) for found in of_experts if found is not None]
                signs = op.scaled_signs_of_groups(keys, moment, group)
            else:
                signs = Transform(transform[0]).scaled_signs(device).expand(len(sources), group).contiguous()
        columnwise = SIDES[tensor][1] == name
        stream = self._first.rounding[name, tensor]
        spans = (stream.row_span, stream.column_span)
        operand: torch.Tensor = op.quantize_mx_groups(
            sources,
            mx_rule(spec),
            columnwise=columnwise,
            keys=[Key.of(gemms.emulated.rounding[name, tensor].key) for gemms in self._experts],
            signs=signs,
            rng_step=moment,
            spans=spans[::-1] if columnwise else spans,
        )
        return operand

    def _product(
        self,
        name: str,
        rows: torch.Tensor,
        weights: Sequence[torch.Tensor],
        tokens: Sequence[int],
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        product: torch.Tensor = load("grouped_gemm").grouped_gemm(
            rows, weights, tokens, alpha=self._first.alpha[name], out_dtype=out_dtype
        )
        return product
