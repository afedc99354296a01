"""Amax histories in the driver's checkpoints: sharded tensors, which load without unpickling."""

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.quantization.amax_history import AMAX


def store_histories_as_tensors(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Replace the layers' extra states by a tensor ``amax.OPERAND`` [length + 1] each, the same on all ranks.

    Args:
        model: a chunk, without wrappers.
        state: its ``sharded_state_dict``; changed in place.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LowPrecLinearMixin) or layer.linear_gemms is None:
            continue
        extra, weight = state[f"{name}._extra_state"], state[f"{name}.weight"]
        extra.data = None
        if isinstance(weight, ShardedTensorFactory):
            weight = weight.build()[0]  # of the two halves of a gated layer
        # the axes of layers and experts, which the weight has in front of its own
        axes = range(weight.prepend_axis_num)
        offsets = [(axis, weight.global_offset[axis], weight.global_shape[axis]) for axis in axes]
        for operand, (history, slot) in layer.linear_gemms.histories.items():
            state[f"{name}.{AMAX}.{operand}"] = ShardedTensor.from_rank_offsets(
                f"{extra.key.removesuffix('_extra_state')}{AMAX}.{operand}",
                history.state(slot),
                *offsets,
                replica_id=extra.replica_id,
                prepend_axis_num=weight.prepend_axis_num,
            )
