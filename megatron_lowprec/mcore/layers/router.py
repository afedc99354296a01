"""Megatron-core's router with auxiliary losses weighed as the loss beside them, which is averaged over tokens.

Under ``calculate_per_token_loss`` Megatron-core divides all gradients by the tokens with a loss, of all microbatches
and data-parallel ranks. Its router multiplies auxiliary losses by a rank's own tokens instead: tokens without a loss
count, those of other tensor-parallel ranks do not, and of several sequences only one does.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megatron_lowprec.mcore.patches import bind
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


def weigh_aux_losses(chunks: Sequence[nn.Module]) -> LossTokens | None:
    """Let the routers of a model multiply their auxiliary losses by the microbatch's tokens with a loss.

    Divided by those of all microbatches, their gradient is a mean over microbatches, weighted as the loss. Each
    tensor- or context-parallel rank has its tokens' part of an auxiliary loss, and the parts are summed.

    Returns:
        The counts of tokens, which the loop keeps; None without routers.

    Raises:
        UserError: this release of Megatron-core has other routers.
    """
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    loss_tokens = LossTokens()
    for router in routers:
        bind(
            "aux_losses",
            router,
            attach_and_log_load_balancing_loss=partial(_attach_load_balancing_loss, loss_tokens),
            apply_z_loss=partial(_attach_z_loss, router, loss_tokens),
        )
    return loss_tokens if routers else None


def _attach_load_balancing_loss(
    loss_tokens: LossTokens, activation: torch.Tensor, aux_loss_coeff: float, aux_loss: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """``activation``, whose backward pass adds the gradient of the loss; nothing is logged."""
    attached: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss * loss_tokens.count())
    return attached


def _attach_z_loss(
    router: TopKRouter, loss_tokens: LossTokens, logits: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """``logits``, likewise with the z-loss."""
    if router.config.moe_z_loss_coeff is None or not (router.training and torch.is_grad_enabled()):
        return logits
    loss = z_loss_func(logits, router.config.moe_z_loss_coeff / router.tp_cp_group.size())
    attached: torch.Tensor = MoEAuxLossAutoScaler.apply(logits, loss * loss_tokens.count())
    return attached
