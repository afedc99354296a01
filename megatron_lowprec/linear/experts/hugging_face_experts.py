"""Experts of Hugging Face transformers, whose weights are 3-D parameters, under a recipe. Imports no transformers.

Mixtral, Qwen3-MoE, DeepSeek and their relatives hold the experts of a layer as one module with ``gate_up_proj`` (or
``up_proj``) and ``down_proj``. transformers decorates its class by ``use_experts_implementation``, which replaces the
forward pass by that of an implementation and notes the layout of the weights in attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from megatron_lowprec.linear.experts.bias_of_tokens import bias_of_tokens
from megatron_lowprec.linear.experts.expert_linear import ExpertLinear
from megatron_lowprec.linear.experts.traced_experts import counted, traced_experts
from megatron_lowprec.linear.layer_state import combined
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.recipe import Recipe

_DECORATED = "transformers.integrations.moe"
_IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm")  # of torch; others are kernels
_WEIGHTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_LAYOUT = ("has_gate", "has_bias", "is_transposed", "num_experts")
_BF16 = Recipe("bf16", "")


@dataclass(frozen=True)
class ExpertWeight:
    """A 3-D parameter of a module: the weights of one linear layer of its experts.

    Attributes:
        owner: the module.
        name: of the parameter in it.
    """

    owner: Any
    name: str

    @property
    def weight(self) -> torch.Tensor:
        """The parameter."""
        found: torch.Tensor = getattr(self.owner, self.name)
        return found

    @property
    def sizes(self) -> tuple[int, int]:
        """Input and output features."""
        _, rows, columns = self.weight.shape
        return (rows, columns) if getattr(self.owner, "is_transposed", False) else (columns, rows)

    def why_not(self) -> str | None:
        """Reason why ``converted`` would not compute what the module's own forward pass does; or None."""
        owner = self.owner
        if "forward" in vars(owner):
            return "the forward of its experts is replaced on the module"
        defined_in = getattr(type(owner).forward, "__globals__", {}).get("__name__")
        if defined_in != _DECORATED or not all(hasattr(owner, each) for each in _LAYOUT):
            kind = type(owner)
            return (
                f"the experts of {kind.__module__}.{kind.__qualname__} have a forward of their own, not that of "
                "transformers' use_experts_implementation"
            )
        if set(_projections(owner)) != {"gate_up_proj" if owner.has_gate else "up_proj", "down_proj"}:
            return f"its experts have the weights {', '.join(_projections(owner))}"
        if (implementation := owner.config._experts_implementation) not in _IMPLEMENTATIONS:
            return f"its experts run the implementation {implementation}, whose kernels follow no recipe"
        if getattr(owner, "_is_expert_parallel", False):
            return "its experts are spread over ranks"
        return None

    def converted(self) -> ExpertLinear:
        """The layer of this parameter, of its module as ``LowPrecExperts``, which starts in bf16."""
        if not isinstance(self.owner, LowPrecExperts):
            self.owner.__class__ = combined(LowPrecExperts, type(self.owner))
            for name in _projections(self.owner):
                linear = ExpertLinear(self.owner, name, self.owner.is_transposed)
                linear.bind(_BF16, Layer(1, name, None))
                self.owner.add_module(_gemms_of(name), linear)
        found: ExpertLinear = getattr(self.owner, _gemms_of(self.name))
        return found


def expert_weights(model: nn.Module) -> Iterator[tuple[str, ExpertWeight]]:
    """The 3-D weights of all modules, by their paths; shared modules once."""
    for path, module in model.named_modules():
        for name in _projections(module):
            yield f"{path}.{name}" if path else name, ExpertWeight(module, name)


def _projections(module: nn.Module) -> list[str]:
    # a convolution has a "weight" of three dimensions
    names = (*_WEIGHTS, "weight") if type(module).__name__.endswith("Experts") else _WEIGHTS
    found = ((name, module._parameters.get(name)) for name in names)
    return [name for name, weight in found if weight is not None and weight.dim() == 3]


def _gemms_of(parameter: str) -> str:
    """Name of a parameter's ``ExpertLinear``; that of the parameter is taken."""
    return f"{parameter}_gemms"


def _by_token(y: torch.Tensor, order: torch.Tensor, top_k_index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [T * k, H] in ``order``, summed for each token [T, H]."""
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    return y[place].view(*top_k_index.shape, y.shape[-1]).sum(dim=1).to(dtype)


class LowPrecExperts(nn.Module):
    """Experts whose linear layers follow a recipe, ``combined`` with the module's class.

    Parameters stay in the module. Each has an ``ExpertLinear`` beside it.
    """

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    post_expert_norm: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As transformers' ``grouped_mm_experts_forward``; rows of an expert keep the order of their tokens.

        Args:
            hidden_states: [T, H].
            top_k_index: int64 [T, k], experts of each token; ``num_experts`` for none.
            top_k_weights: [T, k], the factor of each expert's output.
        """
        if torch.compiler.is_compiling() and not (self.has_bias or getattr(self, "has_post_expert_norm", False)):
            return self._in_graph(hidden_states, top_k_index, top_k_weights)
        return self._counted_by_host(hidden_states, top_k_index, top_k_weights)

    def _in_graph(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows of no expert come last, and are zeros after each layer."""
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        bounds = torch.searchsorted(experts, torch.arange(self.num_experts + 1, device=experts.device))
        y, counts = hidden_states[order // top_k_index.shape[1]], counted(bounds.diff())
        for name in ("gate_up_proj" if self.has_gate else "up_proj", "down_proj"):
            weight = getattr(self, name).mT if self.is_transposed else getattr(self, name)
            y = traced_experts(getattr(self, _gemms_of(name)), y, weight, counts)
            if name != "down_proj":
                y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
        return _by_token(y * top_k_weights.reshape(-1)[order].unsqueeze(-1), order, top_k_index, hidden_states.dtype)

    @torch.compiler.disable(reason="the host counts the tokens of each expert")
    def _counted_by_host(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        tokens = torch.bincount(experts, minlength=self.num_experts)[: self.num_experts].tolist()
        routed, per_token = order[: sum(tokens)], top_k_index.shape[1]
        x = hidden_states[routed // per_token]
        y = self._linear("gate_up_proj" if self.has_gate else "up_proj", x, tokens)
        y = self._linear("down_proj", self._apply_gate(y) if self.has_gate else self.act_fn(y), tokens)
        if getattr(self, "has_post_expert_norm", False):
            y = self.post_expert_norm(y)
        y = y * top_k_weights.reshape(-1)[routed].unsqueeze(-1)
        return _by_token(pad(y, (0, 0, 0, len(order) - len(routed))), order, top_k_index, hidden_states.dtype)

    def _linear(self, name: str, x: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        y: torch.Tensor = getattr(self, _gemms_of(name))(x, tokens)
        if not self.has_bias:
            return y
        bias = getattr(self, f"{name}_bias").to(y.dtype)
        return y + bias_of_tokens(tokens, bias.unbind())

    def _expert_linears(self) -> list[ExpertLinear]:
        return [module for module in self.children() if isinstance(module, ExpertLinear)]

    # ---- copies and moves
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._modules = self._modules.copy()
        for name, linear in self.named_children():
            if isinstance(linear, ExpertLinear):
                if linear.has_owner:  # this is a shallow copy, whose module keeps its layers
                    self._modules[name] = linear = copy(linear)
                linear.belong_to(self)

    def _apply(self, fn: Any, recurse: bool = True) -> LowPrecExperts:
        super()._apply(fn, recurse)
        for linear in self._expert_linears():  # whose weights have moved after them
            linear.histories.to(linear.weight.device)
        return self
