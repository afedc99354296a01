"""Megatron-core's gradient buckets: their weights, ranks and pending reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from megatron_lowprec.comm.gradients import Bounds


class PendingReduction:
    """Handle of a reduction on its own stream; Megatron-core waits on it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def wait(self) -> None:
        """Make the current stream wait for the reduction."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def reduction_stream(chunks: Sequence[DistributedDataParallel]) -> torch.cuda.Stream | None:
    """A stream for reductions that overlap the backward pass; None if they do not, or on a CPU."""
    device = chunks[0].buffers[0].grad_data.device
    return torch.cuda.Stream(device) if chunks[0].ddp_config.overlap_grad_reduce and device.type == "cuda" else None


def start_reduction(
    group: Any,
    reduce: Callable[[], None],
    stream: torch.cuda.Stream | None,
    before: Callable[[], None] | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Replacement of ``_ParamAndGradBucketGroup.start_grad_sync``: run ``reduce``, on ``stream`` if there is one.

    Args:
        before: runs on the current stream first.

    Raises:
        RuntimeError: ``force_all_reduce``, which the distributed optimizer does not need.
    """
    if force_all_reduce:
        raise RuntimeError("FP8 gradients are reduce-scattered: call finalize_model_grads without force_all_reduce")
    if group.is_first_batch and group.grad_reduce_handle is not None:
        return
    assert group.grad_reduce_handle is None
    if before is not None:
        before()
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        reduce()
    if group.ddp_config.overlap_grad_reduce:
        group.grad_reduce_handle = PendingReduction(stream)


def bucket_groups(chunk: DistributedDataParallel) -> Iterator[tuple[Any, list[dist.ProcessGroup]]]:
    """Each bucket group, with the further groups of ranks that hold other shards of its tensors."""
    for groups, tensor in (
        (chunk.bucket_groups, mpu.get_tensor_model_parallel_group()),
        (chunk.expert_parallel_bucket_groups, mpu.get_expert_tensor_parallel_group(check_initialized=False)),
    ):
        sharers = [tensor] if tensor is not None and tensor.size() > 1 else []
        for group in groups:
            yield group, sharers


def tensor_bounds(chunk: DistributedDataParallel) -> dict[nn.Parameter, Bounds]:
    """Bounds of each weight's gradient in its bucket; there may be gaps between weights."""
    found: dict[nn.Parameter, Bounds] = {}
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        for weight, (start, end, bucket) in buffer.param_index_map.items():
            offset = buffer.buckets[bucket].offset
            found[weight] = start - offset, end - offset
    return found


def bucket_weights(bucket: Any, bounds: dict[nn.Parameter, Bounds]) -> list[nn.Parameter]:
    """Weights of a bucket in the order of their gradients."""
    return sorted(bucket.params_list, key=bounds.__getitem__)
