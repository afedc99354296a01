"""Maxima over ranks, for scales that ranks share."""

from collections.abc import Callable

import torch
import torch.distributed as dist


def max_over(amax: torch.Tensor, *groups: dist.ProcessGroup) -> torch.Tensor:
    """Elementwise maximum over the groups' ranks, as a new tensor. NaN becomes Inf, which every backend preserves."""
    amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group in groups:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def maximum_over(*groups: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """``max_over`` bound to these groups."""
    return lambda amax: max_over(amax, *groups)
