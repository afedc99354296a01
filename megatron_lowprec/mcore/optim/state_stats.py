"""Statistics of a recipe's gradients and optimizer state for the metrics log."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_lowprec.comm.gradients import GradientFactor
from megatron_lowprec.mcore.optim.scaled_adam import scaled_adams
from megatron_lowprec.recipe.recipe import OptimizerSpec


@torch.no_grad()
def state_stats(optimizer: MegatronOptimizer, factor: GradientFactor | None) -> dict[str, float]:
    """Metric -> value after a step, the same on all ranks; a collective call, which waits for the device.

    ``gradient saturation`` is the share of the gradient codes at the format's maximum, ``gradient mu`` the factor
    of the next step. ``exp_avg scale min`` and its like are the least and the largest decode scale of a part of the
    state, over all tensors that have one.
    """
    found: dict[str, float] = {}
    if factor is not None:
        found |= {"gradient saturation": float(factor.saturated), "gradient mu": float(factor.mu)}
    inners = scaled_adams(optimizer)
    if not inners:
        return found
    device = optimizer.get_loss_scale().device
    for name in OptimizerSpec().formats:
        scales = torch.cat([inner.decode_scales(name) for inner in inners])
        # a rank may have no tensor with a scale
        ends = torch.full((2,), -torch.inf, device=device)
        if scales.numel():
            ends = torch.stack([-scales.min(), scales.max()])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        least, largest = -float(ends[0]), float(ends[1])
        if largest > 0.0:
            found |= {f"{name} scale min": least, f"{name} scale max": largest}
    return found
