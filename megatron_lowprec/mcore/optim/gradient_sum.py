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
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel

from megatron_lowprec.comm.gradients import AutomaticFactor, Bounds, GradientSum
from megatron_lowprec.recipe.schema import GradientSpec


class _Pending:
    """Handle of a reduction on its own stream; Megatron-core waits on it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def sum_gradients_in(chunks: Sequence[DistributedDataParallel], spec: GradientSpec) -> AutomaticFactor | None:
    """Reduce these chunks' gradients as ``spec`` says; returns its automatic factor, or None.

    The chunks belong to the distributed optimizer. Gradients of a group of one rank are unchanged.
    """
    device = chunks[0].buffers[0].grad_data.device
    factor = AutomaticFactor(device) if spec.sum == "format" else None
    reduce, stream = GradientSum(spec, factor), None
    if chunks[0].ddp_config.overlap_grad_reduce and device.type == "cuda":
        stream = torch.cuda.Stream(device)
    for chunk in chunks:
        for groups, tensor in (
            (chunk.bucket_groups, mpu.get_tensor_model_parallel_group()),
            (chunk.expert_parallel_bucket_groups, mpu.get_expert_tensor_parallel_group(check_initialized=False)),
        ):
            sharers = [tensor] if tensor is not None and tensor.size() > 1 else []
            for group in groups:
                if group.intra_distributed_optimizer_instance_size > 1:
                    group.start_grad_sync = partial(_start, group, reduce, sharers, stream)
    return factor


def _start(
    group: Any,
    reduce: GradientSum,
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
            reduce.reduce_scatter_(bucket.grad_data, _bounds(bucket), bucket.gradient_scaling_factor, ranks, sharers)
    if group.ddp_config.overlap_grad_reduce:
        group.grad_reduce_handle = _Pending(stream)


def _bounds(bucket: Any) -> list[Bounds]:
    """(start, end) of each weight's gradient in the bucket, which has alignment gaps between them."""
    first = bucket.grad_data.storage_offset()
    starts = [(weight.main_grad.storage_offset() - first, weight.numel()) for weight in bucket.params_list]
    return sorted((start, start + size) for start, size in starts)
