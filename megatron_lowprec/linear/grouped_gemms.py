"""fprop, dgrad and wgrad of a layer's experts, over tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lowprec.linear.grouped_emulated import GroupedEmulatedGemms
from megatron_lowprec.linear.layer_tensors import SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.quantization.random_stream import RngStep


@dataclass(frozen=True)
class SavedGroup:
    """Tensors of a group's forward pass for its backward pass.

    Attributes:
        x: the input of all experts, [T, I]; None if each expert saves quantized data.
        experts: weight, and the columnwise data of the quantized input if saved, of each expert.
    """

    x: torch.Tensor | None
    experts: tuple[SavedForBackward, ...]

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, for ``save_for_backward``."""
        return self.x, *(tensor for expert in self.experts for tensor in expert.tensors())

    def without_tensors(self) -> SavedGroup:
        """The rest, to keep beside ``save_for_backward``."""
        return self.with_tensors([None] * len(self.tensors()))

    def with_tensors(self, tensors: Sequence[Any]) -> SavedGroup:
        """The same with other ``tensors``."""
        x, *rest = tensors
        fields = SavedForBackward._fields[: len(rest) // len(self.experts)]
        experts = zip(self.experts, zip(*[iter(rest)] * len(fields), strict=True), strict=True)
        return SavedGroup(x, tuple(one._replace(**dict(zip(fields, values))) for one, values in experts))


class GroupedLinearGemms:
    """The three GEMMs of equally shaped linear layers, the experts of a layer, in one call each.

    Tokens are sorted by expert: the first ``tokens[0]`` rows are the first expert's, and so on. An expert may have
    none. Each expert keeps its ``LinearGemms``: its key of random draws, its amax histories and its cached weights.
    Rows of an expert are numbered from 0, and blocks along tokens begin with its first row. Operands, draws and amaxes
    are therefore those of the experts run one after the other.

    The reference runs the experts' GEMMs in a loop. On a GPU ``GroupedEmulatedGemms`` takes the GEMMs that it supports;
    its operands have the same bits, its products may sum in another order.

    Args:
        experts: the GEMMs of each expert, in the order of their tokens.
    """

    def __init__(self, experts: Sequence[LinearGemms]) -> None:
        self.experts = tuple(experts)
        self._emulated = GroupedEmulatedGemms(self.experts)

    def in_one_launch(self, weight: torch.Tensor) -> frozenset[str]:
        """GEMMs that run for all experts in one launch, with a weight [O, I]; others run one expert after the other."""
        return self._emulated.gemms(weight)

    def forward(
        self,
        x_TI: torch.Tensor,
        tokens: Sequence[int],
        weights: Sequence[torch.Tensor],
        rng_step: RngStep,
        update_amax: bool = True,
        save_input: bool = False,
    ) -> tuple[torch.Tensor, SavedGroup]:
        """``y = x @ w.T`` of each expert's rows, [T, O], and the tensors saved for ``backward``.

        Args:
            x_TI: rows of all experts.
            tokens: rows of each expert; their sum is T.
            weights: [O, I] of each expert.
            update_amax: record amaxes of delayed scaling; False in evaluation.
            save_input: quantize x for wgrad from the same read, where ``LinearGemms.forward`` can.
        """
        if self._emulated.supports("fprop", x_TI, weights):
            x_TI = x_TI.contiguous()
            y = self._emulated.fprop(x_TI, tokens, weights, rng_step, update_amax)
            return y, SavedGroup(x_TI, tuple(SavedForBackward(w, None, None, None, None, x_TI.shape) for w in weights))
        products, saved = [], []
        for gemms, x, w in zip(self.experts, x_TI.split(list(tokens)), weights, strict=True):
            y, one = gemms.forward(x, w, rng_step, update_amax, save_input=save_input)
            products.append(y)
            saved.append(one)
        whole = x_TI if any(one.x_spec is None for one in saved) else None
        return torch.cat(products), SavedGroup(
            whole, tuple(one._replace(x=None) if one.x_spec is None else one for one in saved)
        )

    def backward(
        self,
        dy_TO: torch.Tensor,
        tokens: Sequence[int],
        saved: SavedGroup,
        rng_step: RngStep,
        accumulate_into: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``dx = dy @ w`` of each expert's rows, [T, I], and each expert's ``dw = dy.T @ x``, [O, I].

        Args:
            dy_TO: rows of all experts.
            tokens, saved, rng_step: of the forward pass.
            accumulate_into: fp32 [O, I] of each expert, to which its dw is added, or None for a new dw in dy's dtype.
        """
        weights = [one.weight for one in saved.experts]
        if saved.x is not None and self._emulated.supports("wgrad", dy_TO, weights):
            dy_TO = dy_TO.contiguous()
            dx = self._emulated.dgrad(dy_TO, tokens, weights, rng_step)
            return dx, self._emulated.wgrad(dy_TO, saved.x, tokens, rng_step, accumulate_into)
        rows = list(tokens)
        inputs = [None] * len(rows) if saved.x is None else saved.x.split(rows)
        parts, dw = [], []
        for gemms, dy, x, one, total in zip(
            self.experts, dy_TO.split(rows), inputs, saved.experts, accumulate_into, strict=True
        ):
            grad = gemms.grad_output(dy, rng_step)
            parts.append(gemms.dgrad(grad, one.weight, rng_step, one.weight_amax))
            x_or_data = x if one.x_spec is None else one.input()
            assert x_or_data is not None
            dw.append(gemms.wgrad(grad, x_or_data, rng_step, accumulate_into=total))
        return torch.cat(parts), dw
