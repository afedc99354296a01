"""fprop, dgrad and wgrad of a layer's experts, over tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_lowprec.linear.grouped.grouped_backend import GroupedBackend
from megatron_lowprec.linear.grouped.grouped_emulated import GroupedEmulatedGemms
from megatron_lowprec.linear.grouped.grouped_native import GroupedNativeGemms
from megatron_lowprec.linear.layer_tensors import SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.token_rows import split_rows
from megatron_lowprec.recipe.schema import QuantSpec


@dataclass(frozen=True)
class SavedGroup:
    """Tensors of a group's forward pass for its backward pass.

    Attributes:
        x: the input of all experts, [T, I], or its codes from ``GroupedNativeGemms.fprop`` or the dispatcher; None if
            each expert saves quantized data.
        x_scale: decode scales of the codes, or None.
        experts: weight, and the columnwise data of the quantized input if saved, of each expert.
        dispatched: spec of the dispatcher's codes, which are rowwise; None for others.
    """

    x: torch.Tensor | None
    x_scale: torch.Tensor | None
    experts: tuple[SavedForBackward, ...]
    dispatched: QuantSpec | None = None

    @staticmethod
    def of(
        x: torch.Tensor | QuantizedTensor, weights: Sequence[torch.Tensor], x_scale: torch.Tensor | None = None
    ) -> SavedGroup:
        """Saves x for all experts."""
        experts = tuple(SavedForBackward(weight, None, None, None, None, x.shape) for weight in weights)
        if isinstance(x, QuantizedTensor):
            return SavedGroup(*x.rowwise(), experts, x.spec)
        return SavedGroup(x, x_scale, experts)

    def dequantized(self, dtype: torch.dtype) -> SavedGroup:
        """The same with the dispatcher's codes as a tensor [T, I] in dtype, which wgrad quantizes along tokens."""
        if self.dispatched is None:
            return self
        assert self.x is not None
        x = QuantizedTensor(self.x.shape, dtype, self.dispatched, self.x, self.x_scale).dequantize(dtype)
        return replace(self, x=x, x_scale=None, dispatched=None)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, for ``save_for_backward``."""
        return self.x, self.x_scale, *(tensor for expert in self.experts for tensor in expert.tensors())

    def without_input(self) -> SavedGroup:
        """For a backward pass that recomputes x, or frozen weights, which have no wgrad."""
        return SavedGroup(None, None, tuple(one.without_input() for one in self.experts))

    def without_tensors(self) -> SavedGroup:
        """The rest, to keep beside ``save_for_backward``."""
        return self.with_tensors([None] * len(self.tensors()))

    def with_tensors(self, tensors: Sequence[Any]) -> SavedGroup:
        """The same with other ``tensors``."""
        x, x_scale, *rest = tensors
        fields = SavedForBackward._fields[: len(rest) // len(self.experts)]
        experts = zip(self.experts, zip(*[iter(rest)] * len(fields), strict=True), strict=True)
        restored = tuple(one._replace(**dict(zip(fields, values))) for one, values in experts)
        return SavedGroup(x, x_scale, restored, self.dispatched)


class GroupedLinearGemms:
    """The three GEMMs of equally shaped linear layers, the experts of a layer, in one call each.

    Tokens are sorted by expert: the first ``tokens[0]`` rows are the first expert's, and so on. An expert may have
    none. Each expert keeps its ``LinearGemms``: its key of random draws, its amax histories and its cached weights.
    Rows of an expert are numbered from 0, and blocks along tokens begin with its first row. Operands, draws and amaxes
    are therefore those of the experts run one after the other.

    The reference runs the experts' GEMMs in a loop. On a GPU ``GroupedEmulatedGemms`` and ``GroupedNativeGemms`` take
    the GEMMs that they support; operands have the same bits, products may sum in another order.

    Args:
        experts: the GEMMs of each expert, in the order of their tokens.
    """

    def __init__(self, experts: Sequence[LinearGemms]) -> None:
        self.experts = tuple(experts)
        self._emulated = GroupedEmulatedGemms(self.experts)
        self._native = GroupedNativeGemms(self.experts)

    def in_one_launch(self, weight: torch.Tensor) -> frozenset[str]:
        """GEMMs that run for all experts in one launch, with a weight [O, I]; others run one expert after the other."""
        return self._emulated.gemms(weight) | self._native.gemms(weight)

    def forward(
        self,
        x_TI: torch.Tensor | QuantizedTensor,
        tokens: Sequence[int],
        weights: Sequence[torch.Tensor],
        rng_step: RngStep,
        update_amax: bool = True,
        save_input: bool = False,
    ) -> tuple[torch.Tensor, SavedGroup]:
        """``y = x @ w.T`` of each expert's rows, [T, O], and the tensors saved for ``backward``.

        Args:
            x_TI: rows of all experts; or their codes, of ``LinearGemms.quantize_tokens``.
            tokens: rows of each expert; their sum is T.
            weights: [O, I] of each expert.
            update_amax: record amaxes of delayed scaling; False in evaluation.
            save_input: quantize x for wgrad from the same read, where ``LinearGemms.forward`` can.
        """
        if self._runs(self._emulated, "fprop", x_TI, weights):
            x_TI = x_TI if isinstance(x_TI, QuantizedTensor) else x_TI.contiguous()
            y = self._emulated.fprop(x_TI, tokens, weights, rng_step, update_amax)
            return y, SavedGroup.of(x_TI, weights)
        if self._runs(self._native, "fprop", x_TI, weights):
            y, for_wgrad = self._native.fprop(x_TI, tokens, weights, update_amax, save_input)
            return y, SavedGroup.of(x_TI, weights) if for_wgrad is None else SavedGroup.of(
                for_wgrad[0], weights, for_wgrad[1]
            )
        products, saved = [], []
        rows = split_rows(x_TI, tokens) if isinstance(x_TI, QuantizedTensor) else x_TI.split(list(tokens))
        for gemms, x, w in zip(self.experts, rows, weights, strict=True):
            y, one = gemms.forward(x, w, rng_step, update_amax, save_input=save_input)
            products.append(y)
            saved.append(one)
        if isinstance(x_TI, QuantizedTensor):
            return torch.cat(products), SavedGroup.of(x_TI, weights)
        whole = x_TI if any(one.x_spec is None for one in saved) else None
        return torch.cat(products), SavedGroup(
            whole, None, tuple(one._replace(x=None) if one.x_spec is None else one for one in saved)
        )

    def backward(
        self,
        dy_TO: torch.Tensor | QuantizedTensor,
        tokens: Sequence[int],
        saved: SavedGroup,
        rng_step: RngStep,
        accumulate_into: Sequence[torch.Tensor | None],
        restored: bool = False,
        update_amax: bool = True,
        gemms: Collection[str] = SIDES["grad_output"],
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        """``dx = dy @ w`` of each expert's rows, [T, I], and each expert's ``dw = dy.T @ x``, [O, I].

        Args:
            dy_TO: rows of all experts; or their codes, of ``LinearGemms.quantize_tokens``.
            tokens, saved, rng_step: of the forward pass.
            accumulate_into: fp32 [O, I] of each expert, to which its dw is added, or None for a new dw in dy's dtype.
            restored: as ``LinearGemms.wgrad``.
            update_amax, gemms: as ``LinearGemms.grad_output``; the gradients of other GEMMs are None.
        """
        has_dx, has_dw, none = "dgrad" in gemms, "wgrad" in gemms, [None] * len(tokens)
        saved = saved.dequantized(dy_TO.dtype)
        codes, dy_TO = (dy_TO, dy_TO.dequantize(dy_TO.dtype)) if isinstance(dy_TO, QuantizedTensor) else (None, dy_TO)
        weights = [one.weight for one in saved.experts]
        whole = saved.x is not None or not has_dw
        if whole and self._runs(self._emulated, "wgrad", dy_TO, weights):
            dy_TO = dy_TO.contiguous()
            dx = self._emulated.dgrad(dy_TO if codes is None else codes, tokens, weights, rng_step) if has_dx else None
            if saved.x is None:
                return dx, none
            totals, overwrite = self._totals(accumulate_into, weights)
            self._emulated.wgrad(dy_TO, saved.x, tokens, rng_step, totals, overwrite)
            return dx, totals
        if whole and self._runs(self._native, "wgrad", dy_TO, weights):
            by_row, by_column = self._native.grad_output(dy_TO, tokens, codes, update_amax, gemms)
            dx = None
            if by_row is not None:
                dx = self._native.dgrad(by_row, tokens, weights, dy_TO.dtype, update_amax)
            if saved.x is None or by_column is None:
                return dx, none
            x_or_codes = saved.x if saved.x_scale is None else (saved.x, saved.x_scale)
            totals, overwrite = self._totals(accumulate_into, weights)
            self._native.wgrad(by_column, x_or_codes, tokens, totals, overwrite, update_amax)
            return dx, totals
        assert saved.x_scale is None
        rows = list(tokens)
        inputs = [None] * len(rows) if saved.x is None else saved.x.split(rows)
        parts, dw = [], []
        dys = dy_TO.split(rows) if codes is None else split_rows(codes, rows)
        for expert, dy, x, one, total in zip(self.experts, dys, inputs, saved.experts, accumulate_into, strict=True):
            arrived = isinstance(dy, QuantizedTensor)
            if arrived:
                grad = expert.dispatched_grad_output(dy)
            else:
                grad = expert.grad_output(dy, rng_step, update_amax=update_amax, gemms=gemms)
            if has_dx:
                parts.append(expert.dgrad(grad, one.weight, rng_step, one.weight_amax))
            if has_dw:
                x_or_data = x if one.x_spec is None else one.input()
                assert x_or_data is not None
                dw.append(expert.wgrad(grad, x_or_data, rng_step, accumulate_into=total, restored=restored))
        return torch.cat(parts) if has_dx else None, dw or none

    def _runs(
        self,
        backend: GroupedBackend,
        name: str,
        rows: torch.Tensor | QuantizedTensor,
        weights: Sequence[torch.Tensor],
    ) -> bool:
        """Whether a backend's kernels run a GEMM on the input or output gradient of all experts, and their weights."""
        # instrumented, or in evaluation before any amax: not all experts may have the same scales
        if not all(isinstance(gemms, LinearGemms) and gemms.records for gemms in self.experts):
            return False
        alike = all(w.is_contiguous() and w.dtype == rows.dtype for w in weights)
        return alike and rows.shape[0] > 0 and name in backend.gemms(weights[0])

    def _totals(
        self, accumulate_into: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Each expert's output of wgrad, new if it has no fp32 one; and whether to overwrite it."""
        totals, overwrite = [], []
        for gemms, total, weight in zip(self.experts, accumulate_into, weights, strict=True):
            overwrite.append(total is None or gemms.main_grad_is_zero)
            if total is not None:
                gemms.main_grad_is_zero = False
            totals.append(torch.empty_like(weight) if total is None else total)
        return totals, overwrite
