"""Matrices of Megatron-core's optimizers, of which tensor parallelism and the distributed optimizer hold parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.utils import get_model_config
from torch import nn

from megatron_lowprec.mcore.optim.scaled_adam import tensor_parallel_group, weight_names
from megatron_lowprec.optimizer.muon import Matrix

_NO_MATRICES = ("embedding", "output_layer")


def matrices_of(part: MegatronOptimizer, chunks: Sequence[nn.Module], split_qkv: bool) -> list[Matrix]:
    """The matrices that the ranks of a part's data-parallel group update, in the same order on each.

    As Megatron-core's Muon: weights of two dimensions but embeddings and output layer.

    Args:
        split_qkv: queries, keys and values of a fused projection are three matrices.
    """
    names, config = weight_names(chunks), get_model_config(chunks[0])
    queries = config.num_attention_heads // config.num_query_groups
    of_group = queries * config.kv_channels, config.kv_channels, config.kv_channels
    found: list[Matrix] = []
    for weight, shard in _weights(part):
        if weight.dim() == 2 and not any(name in names[weight] for name in _NO_MATRICES):
            split = of_group if split_qkv and names[weight].endswith("linear_qkv.weight") else ()
            found.append(_Sharded(part, weight, shard, split))
    return found


def _weights(part: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor | None]]:
    """Weights of the model, and what a part's inner optimizer updates for each on this rank."""
    groups = part.optimizer.param_groups
    if isinstance(part, DistributedOptimizer):
        of_rank = part.model_param_group_index_map
        for weight in (weight for buffer in part.buffers for weight in buffer.param_index_map):
            group, place = of_rank.get(weight, (0, None))
            yield weight, None if place is None else groups[group]["params"][place]
        return
    copies: dict[torch.Tensor, nn.Parameter] = {}
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for weights, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            copies |= zip(mains, weights, strict=True)
    for weight in (weight for group in groups for weight in group["params"]):
        yield copies.get(weight, weight), weight


class _Sharded(Matrix):
    """A matrix of the model; updates are gathered in bf16, to which torch's Muon rounds any update first."""

    def __init__(
        self, part: MegatronOptimizer, model: nn.Parameter, weight: torch.Tensor | None, split: tuple[int, ...]
    ) -> None:
        super().__init__(weight, split)
        self._shape, self._device = model.shape, model.device
        self._tensor_group, self._data_group = tensor_parallel_group(model), None
        self._dim = int(getattr(model, "partition_dim", 0))
        self._range = slice(None)
        if isinstance(part, DistributedOptimizer):
            buffer = next(buffer for buffer in part.buffers if model in buffer.param_index_map)
            start, end, number = buffer.param_index_map[model]
            bucket = buffer.buckets[number]
            of_rank = bucket.grad_data.numel() // part.data_parallel_group.size()
            if (start - bucket.offset) // of_rank != (end - 1 - bucket.offset) // of_rank:
                self._data_group = part.data_parallel_group
            if weight is not None:
                entries = part._get_model_param_range_map(model)["param"]
                self._range = slice(entries.start, entries.end)

    def whole(self, update: torch.Tensor | None) -> torch.Tensor | None:
        if self._data_group is not None:
            full = torch.zeros(self._shape.numel(), dtype=torch.bfloat16, device=self._device)
            if update is not None:
                full[self._range] = update.bfloat16()
            dist.all_reduce(full, group=self._data_group)
            update = None if update is None else full
        if update is None:
            return None
        update = update.view(self._shape)
        if self._tensor_group is None:
            return update
        update = update.bfloat16()
        parts = [torch.empty_like(update) for _ in range(self._tensor_group.size())]
        dist.all_gather(parts, update, group=self._tensor_group)
        return torch.cat(parts, self._dim)  # gate and up projections in another order of rows, which changes no row

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        if self._tensor_group is not None:
            whole = whole.chunk(self._tensor_group.size(), self._dim)[self._tensor_group.rank()]
        assert self.weight is not None
        return whole.reshape(-1)[self._range].view(self.weight.shape)
