"""Megatron-core's distributed optimizer around ``ScaledAdamW``.

Megatron-core has a way for optimizers that keep main weights themselves, made for TransformerEngine's: it hands them
the model's weights and gradients as they are, and asks for a decoded state to checkpoint it. ``keeps_main_weights``
asks for that way; ``use_scaled_adam`` then puts our optimizer in the place of the one that Megatron-core has made. The
checkpoint is that of an fp32 state, so that any recipe and layout loads it.

FP8-LM gives each tensor to one rank whole, so that its scale is on one rank. Here ranks hold even parts of a tensor,
as Megatron-core cuts them, and agree on the scale by one maximum over all tensors: the same numerics, without a rank
that waits for the one with the embedding, and with Megatron-core's overlapped gathers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_lowprec.comm.maximum import maximum_over
from megatron_lowprec.optimizer.adamw import ScaledAdamW
from megatron_lowprec.recipe.schema import OptimizerSpec


def keeps_main_weights(options: OptimizerConfig) -> None:
    """Before the optimizer is made. Megatron-core's own flag would ask for TransformerEngine's Adam."""
    options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def use_scaled_adam(optimizer: MegatronOptimizer, spec: OptimizerSpec) -> None:
    """Replace Adam inside each part of Megatron-core's optimizer; their weights are the main weights from here on."""
    for part in optimizer.chained_optimizers:
        assert isinstance(part, DistributedOptimizer)
        if part.is_stub_optimizer:
            continue
        places = {weight: i for i, weight in enumerate(w for buffer in part.buffers for w in buffer.params)}
        held: dict[torch.Tensor, int] = {}
        for model, shards in (
            (part.model_float16_groups, part.shard_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for weights, parts in zip(model, shards, strict=True):
                held |= {shard: places[weight] for weight, shard in zip(weights, parts, strict=True)}
        inner = part.optimizer
        part.optimizer = ScaledAdamW(
            inner.param_groups,
            inner.defaults,
            spec,
            held,
            torch.zeros(len(places), 3, device=part.buffers[0].grad_data.device),
            maximum_over(*_sharers(part)),
        )


def scaled_adams(optimizer: MegatronOptimizer) -> list[ScaledAdamW]:
    """Those inside of Megatron-core's optimizer, none where it is another."""
    parts = optimizer.chained_optimizers
    return [part.optimizer for part in parts if isinstance(getattr(part, "optimizer", None), ScaledAdamW)]


def _sharers(part: DistributedOptimizer) -> list[dist.ProcessGroup]:
    """Groups of ranks that hold parts of the same tensors: of their data-parallel copies, and tensor-parallel ones."""
    experts = any(not getattr(weight, "allreduce", True) for buffer in part.buffers for weight in buffer.params)
    tensor = mpu.get_expert_tensor_parallel_group() if experts else mpu.get_tensor_model_parallel_group()
    return [group for group in (part.data_parallel_group, tensor) if group.size() > 1]
