"""The projections down to the latents of Megatron-core's MLASelfAttention."""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)

from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear


class _WholeLatent:
    """Returns all channels of this rank's tokens, as a linear layer that no rank shards.

    MLASelfAttention gathers the channels of a sharded layer itself, but then not the gradient of the key that rope
    turns: each rank's is that of its own heads, and a gather's backward pass does not sum. For a whole latent it
    gathers that key over the sequence, whose backward pass sums. This needs sequence parallelism.
    """

    tp_group: Any

    def forward(self, input_: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron-core's, [s, b, I] or its shard -> [s / ranks, b, O]."""
        y, bias = super().forward(input_, *args, **options)  # type: ignore[misc]
        if self.tp_group.size() > 1:
            y = scatter_to_sequence_parallel_region(
                gather_from_tensor_model_parallel_region(y, group=self.tp_group), group=self.tp_group
            )
        return y, bias


class DownProjection(_WholeLatent, ColumnParallelLinear):
    """Megatron-core's layer, which ignores the recipe."""


class LowPrecDownProjection(_WholeLatent, LowPrecColumnParallelLinear):
    """The layer under a recipe."""
