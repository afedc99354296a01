"""Position of Megatron-core's parallel linear layers: device, layer number, name, expert, shard."""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear, LowPrecLinearMixin
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.recipe.coverage import LinearSite, why_not_gathered
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.schema import LinearRecipe

_EXPERT = re.compile(r"\.local_experts\.(\d+)")


class BoundLinear(NamedTuple):
    """A linear layer's place, and tensor -> its amax history and slot: what outlives a binding to GEMMs."""

    layer_number: int
    name: str
    expert: int
    histories: dict[str, tuple[AmaxHistory, int]]


def device_of_models() -> torch.device:
    """The current GPU, or the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def linear_id_of(
    module: LowPrecLinearMixin, layer_number: int, name: str, expert: int, share_rng_across_dp: bool
) -> LinearId:
    """Identity of this rank's shard; ``share_rng_across_dp`` gives data-parallel ranks the same random streams."""
    split, group = ("O" if isinstance(module, LowPrecColumnParallelLinear) else "I"), module.tp_group
    return LinearId(
        layer_number,
        name,
        expert,
        0 if share_rng_across_dp else _data_parallel_rank(expert >= 0),
        spans={split: _shard_slice(module, split, name)},
        split=split if group.size() > 1 else "",
    )


def linears(layer: TransformerLayer) -> Iterator[tuple[str, int, LowPrecLinearMixin]]:
    """(name within the layer, global expert or -1, module) of every low-precision linear of a transformer layer."""
    experts_here = sum(bool(_EXPERT.search(name)) and name.endswith("linear_fc1") for name, _ in layer.named_modules())
    for name, module in layer.named_modules():
        if isinstance(module, LowPrecLinearMixin):
            local = _EXPERT.search(name)
            expert = parallel_state.get_expert_model_parallel_rank() * experts_here + int(local[1]) if local else -1
            yield _EXPERT.sub("", name), expert, module


def layers_of_model(layers: Collection[Layer], on_all_stages: bool) -> list[Layer]:
    """Linear layers of the whole model; none while they are unknown.

    Args:
        layers: those of this pipeline stage.
        on_all_stages: gather them; all ranks of a pipeline call it at once. Else they are known where a stage has all.
    """
    found = [list(layers)]
    if on_all_stages and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        found *= group.size()
        dist.all_gather_object(found, list(layers), group=group)
    every = sorted({layer for stage in found for layer in stage})
    numbers = {layer.number for layer in every}
    known = on_all_stages or all(numbers >= set(range(1, (layer.num_layers or 0) + 1)) for layer in every[:1])
    return every if known else []


def site_of(module: LowPrecLinearMixin, layer_number: int, name: str) -> LinearSite:
    """The layer's unsharded sizes."""
    rows, columns = module.weight.shape
    if isinstance(module, LowPrecColumnParallelLinear):
        gated = name.endswith("linear_fc1") and module.config.gated_linear_unit
        return LinearSite(layer_number, name, columns, rows * module.tp_group.size(), "column", gated)
    return LinearSite(layer_number, name, columns * module.tp_group.size(), rows, "row")


def gathered_tensor(module: LowPrecLinearMixin, recipe: LinearRecipe) -> str | None:
    """The tensor of a layer that ranks can gather as FP8 codes; None without a sharded sequence, or if they cannot."""
    tensor = "input" if isinstance(module, LowPrecColumnParallelLinear) else "grad_output"
    return tensor if module.sequence_parallel and why_not_gathered(recipe, tensor) is None else None


def _shard_slice(module: LowPrecLinearMixin, split: str, name: str) -> ShardSlice:
    """Slice of this rank's weight shard in the tensor-parallel dimension."""
    size, group = module.weight.shape[0 if split == "O" else 1], module.tp_group
    if name.endswith("linear_fc1") and module.config.gated_linear_unit:
        part = size // 2  # gate and up projection are sharded separately
        return ShardSlice(group.rank() * part, gate_offset=part, gate_stride=part * (group.size() - 1))
    return ShardSlice(group.rank() * size)


def _data_parallel_rank(expert: bool) -> int:
    """This rank's index among the ranks with replicas of the same weights."""
    if expert:
        return parallel_state.get_expert_data_parallel_rank()
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)
