"""The same linear layer of all experts, whose weights are one parameter, under a recipe. No Megatron."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.grouped_gemms import GroupedLinearGemms
from megatron_lowprec.linear.layer_histories import LayerHistories
from megatron_lowprec.linear.layer_state import StatefulLayer, title, without_autocast
from megatron_lowprec.linear.layer_tensors import backward_gemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.once_differentiable import once_differentiable, refuse
from megatron_lowprec.linear.sharding.dtensors import is_dtensor, waited
from megatron_lowprec.quantization.amax_history import AmaxHistory, empty_histories
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.schema import LinearRecipe


class _GroupHistory:
    """The amax histories of one tensor of all experts, in place of one layer's ``AmaxHistory`` and slot."""

    def __init__(self, slots: Sequence[tuple[AmaxHistory, int]]) -> None:
        self._slots = list(slots)

    def is_empty(self, _: int) -> bool:
        """Whether an expert has no amax in effect."""
        return any(history.is_empty(slot) for history, slot in self._slots)

    def state(self, _: int) -> torch.Tensor:
        """fp32 [experts, length + 1]: ``AmaxHistory.state`` of each."""
        return torch.stack([history.state(slot) for history, slot in self._slots])

    def load_state(self, _: int, state: torch.Tensor | None) -> None:
        """Restore the result of ``state``; None for empty ones."""
        for i, (history, slot) in enumerate(self._slots):
            history.load_state(slot, None if state is None else state[i])


class ExpertGemms:
    """The GEMMs of all experts, with what ``StatefulLayer`` uses of one layer's ``LinearGemms``.

    Args:
        experts: the GEMMs of each expert.
        layer: to which the experts' histories belong.
    """

    def __init__(self, experts: Sequence[LinearGemms], layer: LayerHistories) -> None:
        self.experts, self._layer = tuple(experts), layer
        self.recipe, self.linear_id = experts[0].recipe, experts[0].linear_id
        self.histories: dict[str, Any] = {
            tensor: (_GroupHistory([gemms.histories[tensor] for gemms in experts]), 0)
            for tensor in experts[0].histories
        }
        self._unrecorded = dict[tuple[frozenset[str], ...], ExpertGemms]()

    @cached_property
    def group(self) -> GroupedLinearGemms:
        """The GEMMs in one call each."""
        return GroupedLinearGemms(self.experts)

    def unrecorded(self, current: frozenset[str]) -> ExpertGemms:
        """As ``LinearGemms``; an expert without an amax of a tensor in ``current`` scales it by the current one."""
        everywhere = self._layer.stale

        def own(gemms: LinearGemms) -> frozenset[str]:
            return current if everywhere else current & empty_histories(gemms.recipe, gemms.histories, gradients=True)

        of_experts = tuple(map(own, self.experts))
        if of_experts not in self._unrecorded:
            unrecorded = [gemms.unrecorded(each) for gemms, each in zip(self.experts, of_experts, strict=True)]
            self._unrecorded[of_experts] = ExpertGemms(unrecorded, self._layer)
        return self._unrecorded[of_experts]

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "group"}
        return kept | {"_unrecorded": {}}


# without quantization autograd may differentiate dgrad and wgrad
@once_differentiable(lambda ctx: title(ctx.gemms) if ctx.gemms.recipe.quantized else None)
class _ExpertLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x_TI, weight_EOI, gemms: ExpertGemms, tokens: list[int], rng_step: RngStep, update_amax: bool
    ):
        x_TI, weight_EOI, save_input = waited(x_TI), waited(weight_EOI), ctx.needs_input_grad[1]
        with without_autocast(x_TI):
            y, saved = gemms.group.forward(x_TI, tokens, weight_EOI, rng_step, update_amax, save_input=save_input)
        saved = saved if save_input else saved.without_input()
        ctx.save_for_backward(*saved.tensors())
        ctx.gemms, ctx.tokens, ctx.rng_step, ctx.update_amax = gemms, tokens, rng_step, update_amax
        ctx.saved = saved.without_tensors()
        return y

    @staticmethod
    def backward(ctx, dy_TO):  # type: ignore[no-untyped-def]
        saved, dw_EOI = ctx.saved.with_tensors(ctx.saved_tensors), None
        needs_x, needs_w = ctx.needs_input_grad[:2]
        none, dy_TO = [None] * len(ctx.tokens), waited(dy_TO)
        if needs_w:
            dw_EOI = dy_TO.new_empty(len(none), *saved.weights[0].shape)
        with without_autocast(dy_TO):
            gemms = backward_gemms(needs_x, needs_w)
            dx, _ = ctx.gemms.group.backward(
                dy_TO, ctx.tokens, saved, ctx.rng_step, none, ctx.update_amax, gemms, out=dw_EOI
            )
        return dx, dw_EOI, None, None, None, None


class ExpertLinear(StatefulLayer):
    """A linear layer of all experts: the state of a recipe beside a parameter that another module holds.

    Args:
        owner: the module that holds the parameter.
        parameter: its name there; [experts, O, I], or [experts, I, O] if ``transposed``.
    """

    def __init__(self, owner: nn.Module, parameter: str, transposed: bool = False) -> None:
        super().__init__()
        self._owner: weakref.ref[nn.Module] | None = weakref.ref(owner)
        self._parameter, self._transposed = parameter, transposed

    def gemms_of(self, recipe: LinearRecipe, linear_id: LinearId, seed: int) -> ExpertGemms:
        """As ``StatefulLayer``; the experts' numbers enter the keys of their draws."""
        number = len(self.weight)
        of_tensors = {tensor: self.histories.of(spec) for tensor, spec in recipe.delayed_operands().items()}
        slots = {tensor: history.add_tensors(number) for tensor, history in of_tensors.items()}

        def of_expert(expert: int) -> LinearGemms:
            histories = {tensor: (history, slots[tensor][expert]) for tensor, history in of_tensors.items()}
            return LinearGemms(recipe, replace(linear_id, expert=expert), seed, self.histories.of, histories=histories)

        first = of_expert(0)
        # nothing tells the others apart without draws and histories
        experts = [first] * number if first.is_pure else [first, *map(of_expert, range(1, number))]
        return ExpertGemms(experts, self.histories)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The owner's parameter."""
        owner = None if self._owner is None else self._owner()
        assert owner is not None, "a layer of experts without their module"
        found: torch.Tensor = getattr(owner, self._parameter)
        return found

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The owner's parameter, by which ``LayerGroup`` follows optimizers."""
        yield self.weight  # type: ignore[misc]

    def forward(self, x: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """``x @ weight.T`` of each expert's rows, [T, O].

        Args:
            x: [T, I], sorted by expert, in the dtype of the weight, or any under autocast.
            tokens: rows of each expert; their sum is T.

        Raises:
            UserError: dtypes differ, the weight is sharded, or a layer that draws was converted before
                ``init_process_group``.
        """
        kind, weight = x.device.type, self.weight.mT if self._transposed else self.weight
        if is_dtensor(weight):
            raise UserError(
                f"the weight of {self.linear_gemms.linear_id.name} is a DTensor in its forward pass: experts run whole "
                "on each rank"
            )
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        self.check_dtypes(x, weight.dtype)
        if x.shape[-1] != weight.shape[-1]:
            self.refuse_features(x, weight.shape[-1])
        if torch._C._are_functorch_transforms_active():
            refuse(title(self.linear_gemms), "torch.func")
        self.histories.to(x.device)
        gemms: Any = self.begin_pass()
        # a pass in training without gradients is recorded by its recomputation
        update_amax = self.training and torch.is_grad_enabled()
        with torch.cuda.device_of(x):
            y: torch.Tensor = _ExpertLinearFunction.apply(x, weight, gemms, list(tokens), self.rng_step, update_amax)
        return y

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        experts, rows, columns = self.weight.shape
        sizes = (columns, rows) if not self._transposed else (rows, columns)
        linear = self.linear_gemms.recipe.name
        return f"experts={experts}, in_features={sizes[0]}, out_features={sizes[1]}, recipe={linear}"

    # ---- copies
    @property
    def has_owner(self) -> bool:
        """Whether the layer's module exists; that of a copy is made later."""
        return self._owner is not None and self._owner() is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # the rest when the owner exists

    def belong_to(self, owner: nn.Module) -> None:
        """End a copy: the owner's is made behind those of its modules."""
        self._owner = weakref.ref(owner)
        super().__setstate__(self.__dict__.copy())
