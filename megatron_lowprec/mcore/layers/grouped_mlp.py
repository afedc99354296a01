"""Megatron-core's experts with all experts of a layer in one call per GEMM."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_lowprec.linear.experts.bias_of_tokens import bias_of_tokens
from megatron_lowprec.linear.grouped_gemms import GroupedLinearGemms
from megatron_lowprec.linear.layer_tensors import CachedInput, backward_gemms
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.fusion import GradOutputChannel, attached_cache, attached_input
from megatron_lowprec.mcore.layers.parallel_linear import (
    LowPrecColumnParallelLinear,
    LowPrecRowParallelLinear,
    await_weights,
    title,
)
from megatron_lowprec.mcore.layers.sequential_mlp import LowPrecSequentialMLP, attach_channels
from megatron_lowprec.mcore.rng_step import current_rng_step

Linears = Sequence[LowPrecColumnParallelLinear | LowPrecRowParallelLinear]
"""The same layer of each expert on a rank."""


@once_differentiable(lambda ctx: title(ctx.linears[0].bound_gemms))
class _GroupedLinearFunction(torch.autograd.Function):
    """Gradient accumulation around a group's GEMMs; experts communicate only in the token dispatcher."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x_TI: torch.Tensor,
        tokens: list[int],
        linears: Linears,
        update_amax: bool,
        saves_input: bool,
        channel: GradOutputChannel | None,
        cached: CachedInput | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.group = GroupedLinearGemms([linear.bound_gemms for linear in linears])
        ctx.linears, ctx.tokens, ctx.rng_step, ctx.channel = linears, tokens, current_rng_step(), channel
        ctx.update_amax = update_amax
        attached = attached_input(x_TI, linears[0].bound_gemms)
        x = x_TI if attached is None else attached
        save_input = saves_input and cached is None
        y, saved = ctx.group.forward(x, tokens, weights, ctx.rng_step, update_amax, save_input=save_input)
        ctx.restore, tensors = (None, ()) if cached is None else (cached.restore, cached.tensors)
        saved = saved if save_input else saved.without_input()
        ctx.save_for_backward(*tensors, *saved.tensors())
        ctx.saved, ctx.cached = saved.without_tensors(), len(tensors)
        return y

    @staticmethod
    def backward(ctx, dy_TO):  # type: ignore[no-untyped-def]
        cached, tensors = ctx.saved_tensors[: ctx.cached], ctx.saved_tensors[ctx.cached :]
        saved = ctx.saved.with_tensors(tensors)
        if ctx.restore is not None:
            saved = replace(saved, x=ctx.restore(*cached))
        weights = saved.weights
        gemms = backward_gemms(ctx.needs_input_grad[0], any(ctx.needs_input_grad[-len(weights) :]))
        main_grads: list[torch.Tensor | None] = [None] * len(weights)
        if "wgrad" in gemms:
            main_grads = [linear.fp32_main_grad(weight) for linear, weight in zip(ctx.linears, weights, strict=True)]
        codes = None if ctx.channel is None else ctx.channel.get_codes(dy_TO)
        dy = dy_TO if codes is None else codes
        dx, dw = ctx.group.backward(dy, ctx.tokens, saved, ctx.rng_step, main_grads, ctx.update_amax, gemms)
        dummy, dw = None, list(dw)
        for i, (weight, main_grad) in enumerate(zip(weights, main_grads, strict=True)):
            if main_grad is not None:
                weight.grad_added_to_main_grad = True
                # DDP's hook drops it: views of one tensor, which autograd neither copies nor reads
                dummy = torch.empty_like(weight) if dummy is None else dummy
                dw[i] = dummy.detach()
        return dx, None, None, None, None, None, None, *dw


class GroupedLinear(nn.Module):
    """The same linear layer of all experts on a rank, for one forward pass.

    It has no parameters of its own. It is a module because ``MLP`` of Megatron-core 0.17 calls no other objects.

    Args:
        linears: the layer of each expert; their weights keep their place in the model.
        tokens: tokens of each expert.
    """

    def __init__(self, linears: Linears, tokens: list[int]) -> None:
        super().__init__()
        self.linears, self.tokens = tuple(linears), tokens

    def product(self, x_TI: torch.Tensor, channel: GradOutputChannel | None = None) -> torch.Tensor:
        """[T, I] sorted by expert -> [T, O], without bias; ``channel`` returns dy of all experts as codes."""
        for linear in self.linears:
            await_weights(linear)
        weights = [linear.weight for linear in self.linears]
        saves_input = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        cached = attached_cache(x_TI) if saves_input else None
        y: torch.Tensor = _GroupedLinearFunction.apply(
            x_TI, self.tokens, self.linears, self.linears[0].records_amax(), saves_input, channel, cached, *weights
        )
        return y

    def bias(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The bias of each token's expert, [T, O]; None without biases.

        Args:
            dtype: in which the gradient is summed; None for the biases'.
        """
        biases: list[Any] = [linear.bias for linear in self.linears]
        if biases[0] is None:
            return None
        return bias_of_tokens(self.tokens, [bias.to(dtype or bias.dtype) for bias in biases])

    def forward(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As linear_fc1 of ``MLP``: the product, and the bias that the caller adds."""
        return self.product(x_TI), self.bias()


class _GroupedOutput(GroupedLinear):
    """linear_fc2 of ``MLP``, whose bias ``LowPrecGroupedMLP`` adds."""

    def forward(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, None]:
        channel = self.linears[0].offer_grad_channel(x_TI)
        y = self.product(x_TI, channel)
        if channel is not None:
            channel.attach(y)
        return y, None


class LowPrecGroupedMLP(LowPrecSequentialMLP):
    """``SequentialMLP`` with one call per GEMM for all experts of the rank.

    Modules, weights, initialization and sharded state are those of ``SequentialMLP``, so checkpoints and optimizer
    state are the same for both. On a CPU losses are equal, bit for bit.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        **options: Any,
    ) -> None:
        submodules = submodules or MLPSubmodules(
            linear_fc1=LowPrecColumnParallelLinear, linear_fc2=LowPrecRowParallelLinear
        )
        super().__init__(num_local_experts, config, submodules, **options)

    def why_in_a_loop(self, gemm: str) -> str | None:
        """Reason why a GEMM of one of the linear layers runs one expert after the other; None where none does."""
        for name in ("linear_fc1", "linear_fc2"):
            linears = [getattr(expert, name) for expert in self.local_experts]
            group = GroupedLinearGemms([linear.bound_gemms for linear in linears])
            if (reason := group.why_in_a_loop(gemm, linears[0].weight)) is not None:
                return reason
        return None

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """As ``SequentialMLP``: tokens [T, h] sorted by expert, int64 [experts], probabilities fp32 [T] -> [T, h]."""
        x, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x, probs = (probs.unsqueeze(-1) * x).to(x.dtype), torch.ones_like(probs)
        tokens = tokens_per_expert.tolist()
        fc1 = GroupedLinear([expert.linear_fc1 for expert in self.local_experts], tokens)
        fc2 = _GroupedOutput([expert.linear_fc2 for expert in self.local_experts], tokens)
        y, _ = _with_linears(self.local_experts[0], fc1, fc2)(x, probs)
        bias = fc2.bias(probs.dtype)
        if bias is not None:
            return (y + bias * probs.unsqueeze(-1)).to(y.dtype), None
        attach_channels(y, [y], [len(y)])
        return y, None


def _with_linears(expert: MLP, fc1: GroupedLinear, fc2: GroupedLinear) -> MLP:
    """An expert with other linear layers: its activation is elementwise, and so is that of all experts."""
    whole = copy(expert)
    whole._modules = {**expert._modules, "linear_fc1": fc1, "linear_fc2": fc2}
    return whole


def grouped_launches(layers: Sequence[LowPrecGroupedMLP], gemms: Iterable[str]) -> str:
    """Header line: which GEMMs run for all experts in one launch in all these layers, which in a loop, and why."""
    runs: dict[str, list[str]] = {}
    for gemm in gemms:
        reasons = (layer.why_in_a_loop(gemm) for layer in layers)
        reason = next((reason for reason in reasons if reason is not None), None)
        runs.setdefault("in one launch" if reason is None else f"in a loop ({reason})", []).append(gemm)
    return "experts of a layer run " + "; ".join(f"{', '.join(names)} {how}" for how, names in runs.items())
