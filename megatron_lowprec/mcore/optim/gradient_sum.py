"""Gradient buckets of Megatron-core, reduced over data-parallel ranks by ``comm.gradients``.

Megatron-core starts the reduction of a bucket group by one method, after its last gradient or at the end of the
backward pass. Only these objects' method is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from megatron_lowprec.comm.gradients import Bounds, GradientFactor, GradientSum
from megatron_lowprec.mcore.optim.bucket_layout import (
    bucket_groups,
    bucket_weights,
    reduction_stream,
    start_reduction,
    tensor_bounds,
)
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.recipe.recipe import GradientSpec


def sum_gradients_in(chunks: Sequence[DistributedDataParallel], spec: GradientSpec, factor: GradientFactor) -> None:
    """Reduce these chunks' gradients as ``spec`` says, from and into Megatron-core's gradient buffers.

    The chunks belong to the distributed optimizer. Gradients of a group of one rank are unchanged.
    """
    reduce, stream = GradientSum(spec, factor), reduction_stream(chunks)
    for chunk in chunks:
        bounds = tensor_bounds(chunk)
        for group, sharers in bucket_groups(chunk):
            if group.intra_distributed_optimizer_instance_size > 1:
                work = partial(_reduce, group, reduce, bounds, sharers)
                bind("gradient_reduction", group, start_grad_sync=partial(start_reduction, group, work, stream))


def _reduce(
    group: Any, reduce: GradientSum, bounds: dict[nn.Parameter, Bounds], sharers: Sequence[dist.ProcessGroup]
) -> None:
    for bucket in group.buckets:
        tensors = [bounds[weight] for weight in bucket_weights(bucket, bounds)]
        ranks = group.intra_distributed_optimizer_instance_group
        reduce.reduce_scatter_(bucket.grad_data, tensors, bucket.gradient_scaling_factor, ranks, sharers)
