"""Megatron-core's router with auxiliary losses weighed as the loss beside them, which is averaged over tokens.

Under ``calculate_per_token_loss`` Megatron-core divides all gradients by the tokens with a loss, of all microbatches
and data-parallel ranks. Its router multiplies auxiliary losses by a rank's own tokens instead: tokens without a loss
count, those of other tensor-parallel ranks do not, and of several sequences only one does.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megatron_lowprec.mcore.rng_step import current_rng_step
from megatron_lowprec.quantization.random_stream import RngStep


class LossTokens:
    """Tokens with a loss of each microbatch of a step, on the device; a recomputation finds those of its microbatch."""

    def __init__(self) -> None:
        self._counts: dict[RngStep, torch.Tensor] = {}

    def begin_microbatch(self, loss_mask: torch.Tensor) -> None:
        """Count the tokens of the microbatch whose forward pass follows, over context-parallel ranks; 0 or 1 each."""
        count = loss_mask.sum()
        if parallel_state.get_context_parallel_world_size() > 1:
            dist.all_reduce(count, group=parallel_state.get_context_parallel_group())
        rng_step = current_rng_step()
        if any(other.step != rng_step.step for other in self._counts):
            self._counts.clear()
        self._counts[rng_step] = count

    def count(self) -> torch.Tensor:
        """fp32 scalar, of the microbatch whose forward pass runs or is recomputed."""
        return self._counts[current_rng_step()]


class TokenWeightedRouter(TopKRouter):
    """``TopKRouter`` whose auxiliary losses are multiplied by the microbatch's tokens with a loss.

    Divided by those of all microbatches, their gradient is a mean over microbatches, weighted as the loss. Each
    tensor- or context-parallel rank has its tokens' part of an auxiliary loss, and the parts are summed.
    """

    loss_tokens: LossTokens

    def attach_and_log_load_balancing_loss(
        self, activation: torch.Tensor, aux_loss_coeff: float, aux_loss: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """``activation``, whose backward pass adds the gradient of the loss; nothing is logged."""
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * self.loss_tokens.count())
        return attached

    def apply_z_loss(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``logits``, likewise with the z-loss."""
        if self.config.moe_z_loss_coeff is None or not (self.training and torch.is_grad_enabled()):
            return logits
        loss = z_loss_func(logits, self.config.moe_z_loss_coeff / self.tp_cp_group.size())
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(logits, loss * self.loss_tokens.count())
        return attached


def weigh_aux_losses(chunks: Sequence[nn.Module]) -> LossTokens | None:
    """Let the routers of a model weigh their auxiliary losses by tokens with a loss; None without routers."""
    routers: list[Any] = [module for chunk in chunks for module in chunk.modules() if type(module) is TopKRouter]
    loss_tokens = LossTokens()
    for router in routers:
        router.__class__, router.loss_tokens = TokenWeightedRouter, loss_tokens  # Megatron-core's code names TopKRouter
    return loss_tokens if routers else None
