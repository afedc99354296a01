"""fprop, dgrad and wgrad of a layer's experts, over tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from megatron_lowprec.kernels.dispatch import fuses
from megatron_lowprec.kernels.matrices import Matrices, aligned_rows
from megatron_lowprec.linear.backends.grouped_protocol import (
    GroupedBackend,
    GroupOperand,
    GroupOperands,
    grouped_backend,
)
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.layer_tensors import InputLayout, SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.amax_history import raise_newest
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.token_rows import split_rows
from megatron_lowprec.recipe.schema import QuantSpec

_NO_INPUT = InputLayout(torch.Size())


@dataclass(frozen=True)
class SavedGroup:
    """Tensors of a group's forward pass for its backward pass.

    Attributes:
        x: the input of all experts, [T, I], or its codes: of a backend for wgrad, or of the dispatcher; None if each
            expert saves quantized data.
        x_scale: decode scales of the codes, or None.
        held: the tensors of ``weights``, if ``experts`` is empty.
        experts: what each expert saves; none where x is of all of them.
        dispatched: spec of the dispatcher's codes, which are rowwise; None for others.
    """

    x: torch.Tensor | None
    x_scale: torch.Tensor | None
    held: tuple[torch.Tensor, ...]
    experts: tuple[SavedForBackward, ...] = ()
    dispatched: QuantSpec | None = None

    @staticmethod
    def of(x: torch.Tensor | QuantizedTensor | GroupOperand, weights: Matrices) -> SavedGroup:
        """Saves x for all experts, or its operand of wgrad."""
        if isinstance(x, QuantizedTensor):
            return SavedGroup(*x.rowwise(), weights.tensors, dispatched=x.spec)
        if isinstance(x, GroupOperand):
            assert isinstance(x.data, torch.Tensor)
            return SavedGroup(x.data, x.scale, weights.tensors)
        return SavedGroup(x, None, weights.tensors)

    @property
    def weights(self) -> Matrices:
        """[O, I] of each expert."""
        if self.experts:
            return Matrices([one.weight for one in self.experts])
        return Matrices(self.held[0] if self.held[0].dim() == 3 else self.held)

    def of_experts(self) -> Sequence[SavedForBackward]:
        """What each expert saves, besides x of all."""
        return self.experts or [
            SavedForBackward(weight, None, None, None, None, None, _NO_INPUT) for weight in self.weights
        ]

    def operand(self) -> GroupOperand | None:
        """The operand of wgrad; None if x is unquantized or not saved."""
        return None if self.x is None or self.x_scale is None else GroupOperand(self.x, self.x_scale)

    def dequantized(self, dtype: torch.dtype) -> SavedGroup:
        """The same with the dispatcher's codes as a tensor [T, I] in dtype, which wgrad quantizes along tokens."""
        if self.dispatched is None:
            return self
        assert self.x is not None
        x = QuantizedTensor(self.x.shape, dtype, self.dispatched, self.x, self.x_scale).dequantize(dtype)
        return replace(self, x=x, x_scale=None, dispatched=None)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, for ``save_for_backward``."""
        return self.x, self.x_scale, *self.held, *(tensor for expert in self.experts for tensor in expert.tensors())

    def without_input(self) -> SavedGroup:
        """For a backward pass that recomputes x, or frozen weights, which have no wgrad."""
        return SavedGroup(None, None, self.held, tuple(one.without_input() for one in self.experts))

    def without_tensors(self) -> SavedGroup:
        """The rest, to keep beside ``save_for_backward``."""
        return self.with_tensors([None] * len(self.tensors()))

    def with_tensors(self, tensors: Sequence[Any]) -> SavedGroup:
        """The same with other ``tensors``."""
        each = iter(tensors)
        x, x_scale, *held = islice(each, 2 + len(self.held))
        restored = (SavedForBackward._make((*islice(each, len(one.tensors())), one.layout)) for one in self.experts)
        return SavedGroup(x, x_scale, tuple(held), tuple(restored), self.dispatched)


class GroupedLinearGemms:
    """The three GEMMs of equally shaped linear layers, the experts of a layer, in one call each.

    Tokens are sorted by expert: the first ``tokens[0]`` rows are the first expert's, and so on. An expert may have
    none. Each expert keeps its ``LinearGemms``: its key of random draws, its amax histories and its cached weights.
    Rows of an expert are numbered from 0, and blocks along tokens begin with its first row. Operands, draws and amaxes
    are therefore those of the experts run one after the other.

    The reference runs the experts' GEMMs in a loop. On a GPU a ``GroupedBackend`` takes the GEMMs that resolve to its
    row and that its kernels support; operands have the same bits, products may sum in another order.

    Args:
        experts: the GEMMs of each expert, in the order of their tokens.
    """

    def __init__(self, experts: Sequence[LinearGemms]) -> None:
        self.experts = tuple(experts)
        self._built: dict[str, GroupedBackend | None] = {}

    def why_in_a_loop(self, name: str, weight: torch.Tensor) -> str | None:
        """Reason why a GEMM with a weight [O, I] runs one expert after the other; None where one launch runs all.

        dgrad and wgrad run in one launch only together.
        """
        if not fuses(weight):
            return "kernels need a GPU and Triton"
        backends = self.experts[0].backends
        backends.resolve(weight)
        together = ("fprop",) if name == "fprop" else SIDES["grad_output"]
        row, *others = dict.fromkeys(backends.resolved.gemms[gemm].name for gemm in together)
        if others:
            return f"dgrad runs on {row}, wgrad on {others[0]}"
        if row not in self._built:
            self._built[row] = grouped_backend(row, [expert.backends for expert in self.experts])
        backend = self._built[row]
        if backend is None:
            return f"{row} has no kernels for experts"
        reasons = (backend.why_not(gemm, weight) for gemm in together)
        return next((f"{row}: {reason}" for reason in reasons if reason is not None), None)

    def forward(
        self,
        x_TI: torch.Tensor | QuantizedTensor,
        tokens: Sequence[int],
        weights: Sequence[torch.Tensor] | torch.Tensor,
        rng_step: RngStep,
        update_amax: bool = True,
        save_input: bool = False,
    ) -> tuple[torch.Tensor, SavedGroup]:
        """``y = x @ w.T`` of each expert's rows, [T, O], and the tensors saved for ``backward``.

        Args:
            x_TI: rows of all experts; or their codes, of ``LinearGemms.quantize_tokens``.
            tokens: rows of each expert; their sum is T.
            weights: [O, I] of each expert; or one tensor of all.
            update_amax: record amaxes of delayed scaling; False in evaluation.
            save_input: quantize x for wgrad from the same read, where ``LinearGemms.forward`` can.
        """
        weights = Matrices.of(weights)
        backend = self._backend("fprop", x_TI, weights, update_amax)
        if backend is not None:
            for_wgrad = None
            if isinstance(x_TI, QuantizedTensor):
                operand = backend.from_codes(x_TI, tokens)
            else:
                x_TI = aligned_rows(x_TI)
                both = save_input and self._supported("wgrad", weights[0]) is backend
                request = CastRequest(True, both and backend.fuses_directions("input"), update_amax)
                rowwise, for_wgrad = backend.quantize("input", x_TI, tokens, rng_step, request)
                operand = _present(rowwise)
            of_weights = self._weights("fprop", backend, weights, rng_step, update_amax)
            y = backend.gemm("fprop", operand, of_weights, tokens, x_TI.dtype)
            return y, SavedGroup.of(x_TI if for_wgrad is None else for_wgrad, weights)
        products, saved = [], []
        rows = split_rows(x_TI, tokens) if isinstance(x_TI, QuantizedTensor) else x_TI.split(list(tokens))
        for gemms, x, w in zip(self.experts, rows, weights, strict=True):
            y, one = gemms.forward(x, w, rng_step, update_amax, save_input=save_input)
            products.append(y)
            saved.append(one)
        if isinstance(x_TI, QuantizedTensor):
            return torch.cat(products), SavedGroup.of(x_TI, weights)
        whole = x_TI if any(one.layout.spec is None for one in saved) else None
        return torch.cat(products), SavedGroup(
            whole, None, (), tuple(one._replace(x=None) if one.layout.spec is None else one for one in saved)
        )

    def backward(
        self,
        dy_TO: torch.Tensor | QuantizedTensor,
        tokens: Sequence[int],
        saved: SavedGroup,
        rng_step: RngStep,
        accumulate_into: Sequence[torch.Tensor | None],
        update_amax: bool = True,
        gemms: Collection[str] = SIDES["grad_output"],
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
        """``dx = dy @ w`` of each expert's rows, [T, I], and each expert's ``dw = dy.T @ x``, [O, I].

        Args:
            dy_TO: rows of all experts; or their codes, of ``LinearGemms.quantize_tokens``.
            tokens, saved, rng_step: of the forward pass.
            accumulate_into: fp32 [O, I] of each expert, to which its dw is added, or None for a new dw in dy's dtype.
            update_amax, gemms: as ``LinearGemms.grad_output``; the gradients of other GEMMs are None.
            out: [experts, O, I], in which new dw of all are written.
        """
        has_dx, has_dw, none = "dgrad" in gemms, "wgrad" in gemms, [None] * len(tokens)
        saved = saved.dequantized(dy_TO.dtype)
        codes, dy_TO = (dy_TO, dy_TO.dequantize(dy_TO.dtype)) if isinstance(dy_TO, QuantizedTensor) else (None, dy_TO)
        weights = saved.weights
        whole = saved.x is not None or not has_dw
        backend = self._backend("wgrad", dy_TO, weights, update_amax) if whole else None
        if backend is not None:
            dy_TO, dy, x = aligned_rows(dy_TO), GroupOperands(), saved.operand()
            one_cast = backend.fuses_directions("grad_output")
            rowwise, dx = has_dx and codes is None, None
            if one_cast and (rowwise or has_dw):
                request = CastRequest(rowwise, has_dw, update_amax)
                dy = backend.quantize("grad_output", dy_TO, tokens, rng_step, request)
            if has_dx:
                by_row = dy.rowwise if codes is None else backend.from_codes(codes, tokens)
                if by_row is None:  # one direction is in memory at a time
                    request = CastRequest(True, False, update_amax)
                    by_row = backend.quantize("grad_output", dy_TO, tokens, rng_step, request).rowwise
                w = self._weights("dgrad", backend, weights, rng_step, update_amax)
                dx = backend.gemm("dgrad", _present(by_row), w, tokens, dy_TO.dtype)
                del by_row
            if not has_dw or saved.x is None:
                return dx, none
            by_column = dy.columnwise
            if by_column is None:
                recorded = rowwise and self.experts[0].backends.one_spec["grad_output"]  # by the cast for dgrad
                request = CastRequest(False, True, update_amax and not recorded)
                by_column = backend.quantize("grad_output", dy_TO, tokens, rng_step, request).columnwise
            if x is None:  # fprop by the same spec has recorded its amax
                request = CastRequest(False, True, update_amax and not self.experts[0].backends.one_spec["input"])
                x = backend.quantize("input", aligned_rows(saved.x), tokens, rng_step, request).columnwise
            totals, overwrite = self._totals(accumulate_into, weights, out)
            backend.wgrad(_present(by_column), _present(x), tokens, totals, overwrite)
            return dx, totals
        assert saved.x_scale is None
        rows = list(tokens)
        inputs = [None] * len(rows) if saved.x is None else saved.x.split(rows)
        parts, dw = [], []
        dys = dy_TO.split(rows) if codes is None else split_rows(codes, rows)
        each = zip(self.experts, dys, inputs, saved.of_experts(), accumulate_into, strict=True)
        for expert, dy, x, one, total in each:
            arrived = isinstance(dy, QuantizedTensor)
            if arrived:
                grad = expert.dispatched_grad_output(dy)
            else:
                grad = expert.grad_output(dy, rng_step, update_amax=update_amax, gemms=gemms)
            if has_dx:
                parts.append(expert.dgrad(grad, one.weight, rng_step, one.weight_amax))
            if has_dw:
                x_or_data = x if one.layout.spec is None else one.input()
                assert x_or_data is not None
                dw.append(expert.wgrad(grad, x_or_data, rng_step, accumulate_into=total, input_amax=one.input_amax))
        if out is not None and dw:
            torch._foreach_copy_(out.unbind(), dw)
        return torch.cat(parts) if has_dx else None, dw or none

    @cached_property
    def _runs(self) -> dict[bool, bool]:
        """Whether a backend may run passes that record amaxes (True), and those that do not."""
        recipe, plain = self.experts[0].recipe, all(isinstance(gemms, LinearGemms) for gemms in self.experts)
        return {  # others are instrumented
            True: plain and all(gemms.records for gemms in self.experts),
            # in evaluation an expert without an amax may have current scales
            False: plain and all(gemms.records or gemms.recipe == recipe for gemms in self.experts),
        }

    def _backend(
        self, name: str, rows: torch.Tensor | QuantizedTensor, weights: Matrices, update_amax: bool
    ) -> GroupedBackend | None:
        """The backend that runs a GEMM on x or dy of all experts, and their weights; None for the loop."""
        alike = all(w.is_contiguous() and w.dtype == rows.dtype for w in weights.kinds)
        return self._supported(name, weights[0]) if self._runs[update_amax] and alike and rows.shape[0] > 0 else None

    def _supported(self, name: str, weight: torch.Tensor) -> GroupedBackend | None:
        """The backend whose kernels run a GEMM with a weight [O, I]; None for the loop."""
        if self.why_in_a_loop(name, weight) is not None:
            return None
        return self._built[self.experts[0].backends.resolved.gemms[name].name]

    def _weights(
        self,
        name: str,
        backend: GroupedBackend,
        weights: Matrices,
        rng_step: RngStep,
        update_amax: bool,
    ) -> GroupOperand:
        """Weights of all experts for a GEMM, from the first expert's cache if that holds them."""
        primary = [weight for weight in weights.kinds if isinstance(weight, Fp8Weight)]
        if primary and update_amax and primary[0].spec.scaling == "delayed":
            amax = torch.cat([weight.main_amax for weight in primary])
            raise_newest([gemms.histories["weight"] for gemms in self.experts], amax)
        cache = self.experts[0].weight_cache
        found: GroupOperand | None = cache.get_group(name, backend.name)
        if found is None:
            found = backend.weights(name, weights, rng_step, update_amax)
            if update_amax and (primary or self.experts[0].caches_copies):
                cache.put_group(name, backend.name, found)
        return found

    def _totals(
        self,
        accumulate_into: Sequence[torch.Tensor | None],
        weights: Matrices,
        out: torch.Tensor | None,
    ) -> tuple[Sequence[torch.Tensor], list[bool]]:
        """Each expert's output of wgrad, new if it has no fp32 one; and whether to overwrite it."""
        if out is not None:
            return Matrices(out), [True] * len(out)
        totals, overwrite = [], []
        for gemms, total, weight in zip(self.experts, accumulate_into, weights, strict=True):
            overwrite.append(total is None or gemms.main_grad_is_zero)
            if total is not None:
                gemms.main_grad_is_zero = False
            totals.append(torch.empty_like(weight) if total is None else total)
        return totals, overwrite


def _present(operand: GroupOperand | None) -> GroupOperand:
    assert operand is not None, "a backend returned no operand in a direction that was requested"
    return operand
