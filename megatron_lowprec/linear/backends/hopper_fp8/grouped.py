"""FP8 GEMMs of a layer's experts on tensor cores: a few launches per operand and one per product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from megatron_lowprec.kernels.dispatch import load, transpose_groups
from megatron_lowprec.kernels.matrices import Matrices
from megatron_lowprec.linear.backends.grouped_protocol import GroupedBackend, GroupOperand, GroupOperands
from megatron_lowprec.linear.backends.hopper_fp8.dense import HopperFp8Gemms, rule_of
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.backends.resolved import LayerBackends
from megatron_lowprec.quantization.amax_history import cells_of
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import GEMM_OPERANDS

_BLOCK = 128
_BLOCKS = {"input": "1x128", "weight": "128x128", "grad_output": "1x128"}

Codes = tuple[torch.Tensor, torch.Tensor]
"""FP8 codes and fp32 decode scales."""


class GroupedHopperFp8Gemms(GroupedBackend):
    """``GroupedBackend`` with scales per tensor, row, or block: 1x128 of tokens, 128x128 of weights.

    Rows of an expert are padded with zeros to whole blocks of 128, so that a block has entries of one expert only.
    """

    def __init__(self, experts: Sequence[LayerBackends], name: str) -> None:
        super().__init__(experts, name)
        self._first = cast(HopperFp8Gemms, experts[0].built(name))
        self._specs = self._first.operand_specs

    def why_not(self, gemm: str, weight: torch.Tensor) -> str | None:
        """As ``GroupedBackend``."""
        specs = {tensor: getattr(self._recipe.gemms[gemm], tensor) for tensor in GEMM_OPERANDS[gemm]}
        found = {tensor: None if spec is None else spec.granularity for tensor, spec in specs.items()}
        blocks = {tensor: _BLOCKS[tensor] for tensor in specs}
        known = found in (dict.fromkeys(specs, "tensor"), dict.fromkeys(specs, "row"))
        if not known and (found != blocks or any(size % _BLOCK for size in weight.shape)):
            return "kernels take scales per tensor or row, or whole blocks of 1x128 and 128x128"
        if gemm != "fprop" and not self.fuses_directions("grad_output"):
            return "dgrad and wgrad quantize the output gradient differently"
        return None

    def fuses_directions(self, tensor: str) -> bool:
        """As ``GroupedBackend``: where both GEMMs have one spec."""
        return self._specs.get((tensor, False)) == self._specs.get((tensor, True))

    def quantize(
        self, tensor: str, matrix: torch.Tensor, tokens: Sequence[int], rng_step: RngStep, request: CastRequest
    ) -> GroupOperands:
        """As ``GroupedBackend``; rows padded."""
        rowwise, columnwise = request.rowwise, request.columnwise
        spec, experts = self._specs[tensor, not rowwise], Matrices(matrix, tokens)
        if spec.granularity != "row":
            return self._cast(tensor, experts, rowwise, columnwise, request.update_amax)
        padded = load("grouped_fp8_gemm").pad_groups(matrix, tokens) if rowwise else None
        by_row = None if padded is None else self._cast_rows(tensor, padded)
        return GroupOperands(by_row, self._cast_columns(tensor, experts) if columnwise else None)

    def from_codes(self, codes: QuantizedTensor, tokens: Sequence[int]) -> GroupOperand:
        """As ``GroupedBackend``: padded by zeros as ``quantize`` pads them."""
        data, scale = codes.rowwise()
        assert scale is not None
        pad_groups = load("grouped_fp8_gemm").pad_groups
        data = pad_groups(data.view(torch.uint8), tokens).view(data.dtype)
        return GroupOperand(data, pad_groups(scale, tokens).t().contiguous().t())

    def weights(self, gemm: str, weights: Matrices, rng_step: RngStep, update_amax: bool) -> GroupOperand:
        """As ``GroupedBackend``."""
        columnwise = gemm == "dgrad"
        primary = [weight for weight in weights.kinds if isinstance(weight, Fp8Weight)]
        if primary:
            return _primary_weights(primary, columnwise)
        data, scale = self._weight_codes(weights, columnwise, update_amax)
        return GroupOperand(Matrices(data), scale)

    def gemm(
        self, name: str, rows: GroupOperand, weights: GroupOperand, tokens: Sequence[int], out_dtype: torch.dtype
    ) -> torch.Tensor:
        """As ``GroupedBackend``."""
        product: torch.Tensor = load("grouped_fp8_gemm").grouped_fp8_gemm(
            *rows,
            *weights,
            tokens,
            granularity=self._specs["input" if name == "fprop" else "grad_output", False].granularity,
            out_dtype=out_dtype,
            fast_accumulation=self._first.fast_accumulation[name],
        )
        return product

    def wgrad(
        self,
        dy: GroupOperand,
        x: GroupOperand,
        tokens: Sequence[int],
        totals: Sequence[torch.Tensor],
        overwrite: Sequence[bool],
    ) -> None:
        """As ``GroupedBackend``."""
        load("grouped_fp8_gemm").grouped_fp8_wgrad_(
            *dy,
            *x,
            tokens,
            totals,
            granularity=self._specs["grad_output", True].granularity,
            overwrite=overwrite,
            fast_accumulation=self._first.fast_accumulation["wgrad"],
        )

    def _weight_codes(self, weights: Matrices, columnwise: bool, update_amax: bool) -> Codes:
        """With scales per expert, row or block; padding adds rows that no product has, or columns beyond K."""
        experts, rows = len(weights), weights[0].shape[0]
        granularity = self._specs["weight", columnwise].granularity
        if granularity == "row" and not columnwise:
            data, scale = cast(Codes, self._cast_rows("weight", weights.joined()))
            return data.unflatten(0, (experts, -1)), scale.view(experts, -1)
        if granularity == "row":
            data, scale = cast(Codes, self._cast_columns("weight", weights))
        else:
            operand = self._cast("weight", weights, not columnwise, columnwise, update_amax)[columnwise]
            assert operand is not None
            data, scale = cast(Codes, operand)
        if granularity == "128x128" and columnwise:
            scale = scale[:, : data.shape[1] // _BLOCK].unflatten(1, (experts, -1)).transpose(0, 1)
        elif granularity == "128x128":
            scale = scale.unflatten(0, (experts, -1))
        if columnwise:
            return data.unflatten(1, (experts, -1)).transpose(0, 1)[:, :, :rows], scale
        return data.unflatten(0, (experts, -1))[:, :rows], scale

    def _cast_rows(self, tensor: str, matrix: torch.Tensor) -> GroupOperand:
        """Codes and scales of rows, which are of one expert each."""
        casts = load("cast_fp8")
        amax = casts.amax_of(matrix, vectors=True)
        reduce = self._first.reductions[tensor, False]
        if reduce is not None:
            amax[: matrix.shape[0]] = reduce(amax[: matrix.shape[0]])
        found = casts.cast_fp8(matrix, rule_of(self._specs[tensor, False]), rowwise=True, columnwise=False, amax=amax)
        return GroupOperand(found.rowwise_data, found.rowwise_scale)

    def _cast_columns(self, tensor: str, sources: Matrices) -> GroupOperand:
        """Columnwise codes, with a scale for each column of each expert."""
        rule, reduce = rule_of(self._specs[tensor, True]), self._first.reductions[tensor, True]
        cast_fp8_groups = load("grouped_cast_fp8").cast_fp8_groups
        found = cast_fp8_groups(sources, rule, reduce_amax=reduce, rowwise=False, columnwise=True)
        return GroupOperand(found.columnwise_data, found.columnwise_scale)

    def _cast(
        self, tensor: str, sources: Matrices, rowwise: bool, columnwise: bool, update_amax: bool
    ) -> GroupOperands:
        """Rowwise and columnwise codes of each expert's tensor, with a scale each or block scales."""
        spec, amaxes = self._specs[tensor, not rowwise], dict[str, Any]()
        if spec.scaling == "delayed":
            amaxes["amax"], newest = cells_of(self._histories(tensor))
            amaxes["observed"] = newest if update_amax else None
        elif spec.granularity == "tensor":
            amaxes["reduce_amax"] = self._first.reductions[tensor, not rowwise]
        cast_fp8_groups = load("grouped_cast_fp8").cast_fp8_groups
        found = cast_fp8_groups(sources, rule_of(spec), rowwise=rowwise, columnwise=columnwise, **amaxes)
        return GroupOperands(
            GroupOperand(*found[:2]) if rowwise else None, GroupOperand(*found[2:4]) if columnwise else None
        )


def _primary_weights(weights: Sequence[Fp8Weight], columnwise: bool) -> GroupOperand:
    """Codes and scales of ``Fp8Weight.quantized``: for fprop the stored codes, for dgrad a transposed copy of all."""
    scales = [weight.decode_scale for weight in weights]
    scale = torch.cat(scales) if weights[0].spec.block is None else torch.stack(scales)
    if not columnwise:
        return GroupOperand([weight.elements() for weight in weights], scale)
    codes = transpose_groups([weight.elements() for weight in weights])
    return GroupOperand(Matrices(codes), scale if scale.dim() == 1 else scale.transpose(1, 2).contiguous())
