"""One update by Megatron-core's optimizer in a few launches, with one wait for the device.

Without TransformerEngine and apex, Megatron-core processes gradients one by one: its norm synchronizes once a tensor,
its clipping takes two launches a tensor, its copy of main weights one. The functions here are the steps of its
``ChainedOptimizer.step``, in its order, over all tensors at once (torch's foreach functions), with or without these
libraries. ``copy_weights_at_once`` must replace a method of the optimizer objects; nothing else is patched.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch.nn.utils import get_total_norm

from megatron_lowprec.mcore.optim.fp8_param_gather import quantize_main_weights
from megatron_lowprec.mcore.optim.fused_adamw import FusedAdamW, main_weights, supports_fused_adamw
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.mcore.pending_numbers import PendingNumbers
from megatron_lowprec.mcore.releases import grads_for_norm
from megatron_lowprec.optimizer.adamw import ScaledAdamW
from megatron_lowprec.quantization.primary_weight import Fp8Weight

_TINY = 1.0e-6  # Megatron-core's, in the denominator of clipping


@torch.no_grad()
def optimizer_step(
    optimizer: MegatronOptimizer, loss: torch.Tensor | None = None
) -> tuple[bool, float | None, int | None]:
    """Update the weights; returns (updated, gradient norm before clipping, number of zero gradient values).

    Megatron-core detects non-finite gradients only by its loss scaler, which bf16 has not. So norm and loss decide
    here: if either is not finite, weights and moments are unchanged.

    Args:
        optimizer: the ``ChainedOptimizer`` that ``get_megatron_optimizer`` returns.
        loss: scalar on the device of the weights, the same on all ranks.
    """
    if optimizer.prepare_grads():
        return False, None, None
    norm = grad_norm(optimizer)
    numbers = PendingNumbers(torch.stack([norm, norm if loss is None else loss.to(norm)]))
    # While the host waits for these numbers, the device has work, and the host has collected what to launch next.
    launched, clipped = [], []
    for part in optimizer.chained_optimizers:
        limit, update = part.config.clip_grad, _launched_update(part)
        if update is not None:
            update.launch(grad_factor(norm, limit, loss))
            launched.append(update)
        elif limit > 0.0:
            clipped.append((limit, gradients(part)))
    norm_value, loss_value = numbers.wait()
    if not (math.isfinite(norm_value) and math.isfinite(loss_value)):
        for update in launched:
            update.launched = False
        return False, norm_value, None
    for limit, grads in clipped:
        factor = limit / (norm_value + _TINY)
        if grads and factor < 1.0:
            torch._foreach_mul_(grads, factor)
    zeros = optimizer.count_zeros() if optimizer.config.log_num_zeros_in_grad else None
    return optimizer.step_with_ready_grads(), norm_value, zeros


def _launched_update(part: MegatronOptimizer) -> FusedAdamW | ScaledAdamW | None:
    """The part's update that needs no number on the host; None if there is none."""
    if isinstance(part.optimizer, ScaledAdamW):
        return part.optimizer
    found: FusedAdamW | None = getattr(part, "fused_adamw", None)
    return found


def grad_factor(norm: torch.Tensor, limit: float, loss: torch.Tensor | None) -> torch.Tensor:
    """Factor that clips gradients, at most 1; NaN if norm or loss is not finite: fp32 scalar.

    Args:
        norm: L2 norm of all gradients, float64 scalar.
        limit: of the norm; 0: no clipping.
    """
    factor = (limit / (norm + _TINY)).clamp(max=1.0) if limit > 0.0 else torch.ones_like(norm)
    finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
    return torch.where(finite, factor, math.nan).float()


def gradients(part: MegatronOptimizer) -> list[torch.Tensor]:
    """Gradients of all weights that this part updates, including weights shared between ranks: fp32, or in the dtype
    of the reduction if the optimizer holds the main weights.
    """
    name = "decoupled_grad" if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
    found = (getattr(weight, name, None) for weight in part.get_parameters())
    return [grad for grad in found if grad is not None]


@torch.no_grad()
def grad_norm(optimizer: MegatronOptimizer) -> torch.Tensor:
    """L2 norm of all gradients of the model, each counted once, over all ranks: float64 scalar on the device.

    Only the sum of squares over ranks is in float64; each rank's own norm is torch's, in fp32.
    """
    by_group: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    for part in optimizer.chained_optimizers:
        # Dense and expert weights lie on different ranks; most often both are reduced over the same group.
        grads = by_group.setdefault(part.get_grad_stats_parallel_group(), [])
        grads += grads_for_norm(part)
    total = torch.zeros((), dtype=torch.float64, device=optimizer.get_loss_scale().device)
    for group, grads in by_group.items():
        # A rank without weights still takes part in the reduction.
        square = get_total_norm(grads).double().square() if grads else torch.zeros_like(total)
        dist.all_reduce(square, group=group)
        total += square
    return total.sqrt()


def fuse_adamw(optimizer: MegatronOptimizer) -> None:
    """Let one kernel clip, update and round the weights of the parts that torch's AdamW updates on a GPU."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer and supports_fused_adamw(part):
            part.fused_adamw = FusedAdamW(part)


def copy_weights_at_once(optimizer: MegatronOptimizer) -> None:
    """Make the optimizer round its fp32 main weights into the model's bf16 weights in one call instead of one each,
    and quantize FP8 primary weights (``fp8_param_gather``).

    Megatron-core calls a method for this in the middle of ``step_with_ready_grads``; the method is replaced on these
    objects only. The result is the same. Main weights of fp32 models are the model's own.
    """
    for part in optimizer.chained_optimizers:
        kinds = (Float16OptimizerWithFloat16Params, DistributedOptimizer)
        if isinstance(part, kinds) and not part.is_stub_optimizer and not _has_foreign_fp8_weights(part):
            bind("model_weights", part, _copy_main_params_to_model_params=partial(_copy_weights, part))


def _has_foreign_fp8_weights(part: Float16OptimizerWithFloat16Params | DistributedOptimizer) -> bool:
    """Whether the part has FP8 weights of TransformerEngine, which only Megatron-core's own method can update."""
    weights = [weight for buffer in getattr(part, "buffers", ()) for weight in buffer.params]
    return any(is_float8tensor(weight) and not isinstance(weight, Fp8Weight) for weight in weights)


def _copy_weights(part: Float16OptimizerWithFloat16Params | DistributedOptimizer) -> None:
    quantize_main_weights(part, ahead=True)
    if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return  # the inner optimizer has updated the other weights
    if getattr(part, "fused_adamw", None) is not None:
        return  # as has the fused update
    pairs = main_weights(part)
    if pairs:
        torch._foreach_copy_([weight for weight, _ in pairs], [main.data for _, main in pairs])
