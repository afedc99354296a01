"""Gradients of Megatron-core's DistributedDataParallel, stored in FP8 instead of its fp32 or bf16 buffers.

A weight has an fp32 ``main_grad`` only while it is written: from its first gradient of a microbatch, or of a step under
``gradients.accumulation`` fp32, until its last. Then it is cast to FP8 codes and freed. The codes of a bucket replace
its buffer: one byte a weight before and after the reduction. At other times ``main_grad`` is a placeholder of NaN, to
which torch does not write.

``store_gradients_in`` replaces methods of these objects only: of buffers (``reset``, ``scale_gradients``), of bucket
groups (``start_grad_sync``) and of the wrapped chunk (``finish_grad_sync``). ``decode_gradients_in`` replaces those
by which the distributed optimizer reads gradients and updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from megatron_lowprec.comm.gradient_codes import GradientCodes
from megatron_lowprec.comm.gradients import GradientFactor, GradientSum
from megatron_lowprec.mcore.optim.bucket_layout import (
    bucket_groups,
    bucket_weights,
    reduction_stream,
    start_reduction,
    tensor_bounds,
)
from megatron_lowprec.mcore.optim.stored_gradient import StoredGradient
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.recipe.recipe import GradientSpec


class _StoredBucket(NamedTuple):
    """A bucket of Megatron-core with its codes and, in their order, its weights' gradients."""

    bucket: Any
    codes: GradientCodes
    gradients: Sequence[StoredGradient]


def store_gradients_in(chunks: Sequence[DistributedDataParallel], spec: GradientSpec, factor: GradientFactor) -> None:
    """Store and reduce these chunks' gradients in FP8; frees their gradient buffers.

    The chunks belong to the distributed optimizer; call ``decode_gradients_in`` for each of its parts. Under
    ``gradients.accumulation`` fp32, run all microbatches but a step's last one in ``no_sync()``.
    """
    reduction, stream = GradientSum(spec, factor), reduction_stream(chunks)
    device = chunks[0].buffers[0].grad_data.device
    for chunk in chunks:
        bounds, stored = tensor_bounds(chunk), dict[int, _StoredBucket]()
        for group, sharers in bucket_groups(chunk):
            here = []
            for bucket in group.buckets:
                weights = bucket_weights(bucket, bounds)
                tensors = [bounds[weight] for weight in weights]
                codes = GradientCodes(bucket.grad_data.numel(), tensors, reduction, device)
                stays = partial(_more_microbatches, group) if spec.accumulation == "fp32" else None
                here.append(
                    _StoredBucket(bucket, codes, [StoredGradient(w, codes, i, stays) for i, w in enumerate(weights)])
                )
            stored |= {id(found.bucket): found for found in here}
            work = partial(_reduce, group, here, sharers)
            start = partial(start_reduction, group, work, stream, partial(_cast, here))
            bind("gradient_reduction", group, start_grad_sync=start)
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            mine = [stored[id(bucket)] for bucket in buffer.buckets]
            _free(buffer)
            bind("gradient_storage", buffer, reset=partial(_reset, mine), scale_gradients=partial(_scale, mine))
        for gradient in (gradient for found in stored.values() for gradient in found.gradients):
            gradient.register_hooks()
        if _ranks_of_a_replica() > 1:
            finish = partial(_finish, chunk, stored, chunk.finish_grad_sync)
            bind("gradient_storage", chunk, finish_grad_sync=finish)


def _more_microbatches(group: Any) -> bool:
    return not group.is_last_microbatch


def _free(buffer: Any) -> None:
    """Replace a buffer's gradients by a placeholder of its size, NaN, to which torch does not write."""
    placeholder = torch.full((), torch.nan, device=buffer.grad_data.device).expand(buffer.numel)
    bind("gradient_storage", buffer, grad_data=placeholder)
    for bucket in buffer.buckets:
        bind("gradient_storage", bucket, grad_data=placeholder[: bucket.grad_data.numel()])


def _reset(buckets: Sequence[_StoredBucket]) -> None:
    """Replacement of ``_ParamAndGradBuffer.reset``."""
    for found in buckets:
        found.codes.reset()
        for gradient in found.gradients:
            gradient.reset()


def _scale(buckets: Sequence[_StoredBucket], factor: float | torch.Tensor) -> None:
    """Replacement of ``_ParamAndGradBuffer.scale_gradients``, which Megatron-core calls after the reduction."""
    for found in buckets:
        found.codes.scale_(factor)
        for gradient in found.gradients:
            gradient.scale_exposed_(factor)


def _cast(buckets: Sequence[_StoredBucket]) -> None:
    for gradient in (gradient for found in buckets for gradient in found.gradients):
        gradient.cast()


def _reduce(group: Any, buckets: Sequence[_StoredBucket], sharers: Sequence[dist.ProcessGroup]) -> None:
    for found in buckets:
        ranks = group.intra_distributed_optimizer_instance_group
        found.codes.reduce(found.bucket.gradient_scaling_factor, ranks, sharers)


def _finish(
    chunk: DistributedDataParallel,
    stored: dict[int, _StoredBucket],
    finish: Callable[..., None],
    force_all_reduce: bool = False,
) -> None:
    """Replacement of ``DistributedDataParallel.finish_grad_sync``.

    Megatron-core then adds some gradients over tensor-parallel ranks or pipeline stages; these become fp32.
    """
    finish(force_all_reduce=force_all_reduce)
    for group, _ in bucket_groups(chunk):
        ranks, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        for bucket in group.buckets:
            found = stored[id(bucket)]
            size = bucket.grad_data.numel() // ranks
            for gradient, (start, end) in zip(found.gradients, found.codes.tensors, strict=True):
                if _reduced_further(gradient.weight):
                    first = max(rank * size, start)
                    gradient.expose(first - start, max(first, min((rank + 1) * size, end)) - start)


def _ranks_of_a_replica() -> int:
    tensor, stages = mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()
    return int(tensor * stages)


def _reduced_further(weight: nn.Parameter) -> bool:
    """Whether Megatron-core's ``finalize_model_grads`` may add this weight's gradient over other ranks."""
    names = ("sequence_parallel", "shared_embedding", "average_gradients_across_tp_domain")
    return weight.dim() == 1 or any(getattr(weight, name, False) for name in names)


def decode_gradients_in(part: Any) -> None:
    """Make a ``DistributedOptimizer`` read the gradients that ``store_gradients_in`` stores."""
    if not part.is_stub_optimizer:
        bind(
            "gradient_storage",
            part,
            _copy_model_grads_to_main_grads=partial(_decode, part),
            step_with_ready_grads=partial(_update_and_free, part, part.step_with_ready_grads),
        )


def _update_and_free(part: Any, update: Callable[[], bool]) -> bool:
    """Replacement of ``DistributedOptimizer.step_with_ready_grads``: frees the fp32 gradients after the update."""
    updated = update()
    for shard in part.get_parameters():
        shard.grad = shard.decoupled_grad = None
    for model in (*part.model_float16_groups, *part.model_fp32_groups):
        for weight in model:
            weight.stored_gradient.release()
    return updated


def _decode(part: Any) -> None:
    """Replacement of ``DistributedOptimizer._copy_model_grads_to_main_grads``: fp32 gradients of this rank's shards."""
    aware = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    shards = part.shard_float16_groups if aware else part.shard_fp32_from_float16_groups
    decoded: dict[GradientCodes, Any] = {}
    for model, main in (
        *zip(part.model_float16_groups, shards, strict=True),
        *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
    ):
        for weight, shard in zip(model, main, strict=True):
            place = part._get_model_param_range_map(weight)["param"]
            stored: StoredGradient = weight.stored_gradient
            if stored.codes not in decoded:
                decoded[stored.codes] = stored.codes.parts()
            grad = stored.part(place.start, place.end, decoded[stored.codes])
            setattr(shard, "decoupled_grad" if aware else "grad", grad)
