"""Gradient buckets of Megatron-core, reduced over data-parallel ranks by ``comm.gradients``.

Megatron-core starts the reduction of a bucket group by one method, after its last gradient or at the end of the
backward pass. Only these objects' method is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from megatron_lowprec.comm.gradients import Bounds, GradientFactor, GradientSum
from megatron_lowprec.mcore.optim.bucket_layout import (
    PendingReduction,
    bucket_groups,
    bucket_weights,
    reduction_stream,
    tensor_bounds,
)
from megatron_lowprec.recipe.schema import GradientSpec


def sum_gradients_in(chunks: Sequence[DistributedDataParallel], spec: GradientSpec, factor: GradientFactor) -> None:
    """Reduce these chunks' gradients as ``spec`` says, from and into Megatron-core's gradient buffers.

    The chunks belong to the distributed optimizer. Gradients of a group of one rank are unchanged.
    """
    reduce, stream = GradientSum(spec, factor), reduction_stream(chunks)
    for chunk in chunks:
        bounds = tensor_bounds(chunk)
        for group, sharers in bucket_groups(chunk):
            if group.intra_distributed_optimizer_instance_size > 1:
                group.start_grad_sync = partial(_start, group, reduce, bounds, sharers, stream)


def _start(
    group: Any,
    reduce: GradientSum,
    bounds: dict[nn.Parameter, Bounds],
    sharers: Sequence[dist.ProcessGroup],
    stream: torch.cuda.Stream | None,
    force_all_reduce: bool = False,
) -> None:
    """Replacement of ``_ParamAndGradBucketGroup.start_grad_sync``."""
    assert not force_all_reduce
    if group.is_first_batch and group.grad_reduce_handle is not None:
        return
    assert group.grad_reduce_handle is None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        for bucket in group.buckets:
            ranks = group.intra_distributed_optimizer_instance_group
            tensors = [bounds[weight] for weight in bucket_weights(bucket, bounds)]
            reduce.reduce_scatter_(bucket.grad_data, tensors, bucket.gradient_scaling_factor, ranks, sharers)
    if group.ddp_config.overlap_grad_reduce:
        group.grad_reduce_handle = PendingReduction(stream)
