"""Linear layers whose weight is a DTensor on a tensor-parallel mesh, as ``parallelize_module`` shards it.

Each rank quantizes its shard with the bits of the whole: a scale that spans ranks follows from the maximum of their
amaxes, and draws from the shard's place in the unsharded weight. Collectives of activations are DTensor's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from megatron_lowprec.comm.maximum import maximum_over
from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear.layer_histories import LayerGroup
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.linear.sharding.dtensors import is_dtensor
from megatron_lowprec.recipe.coverage import LinearSite, indivisible
from megatron_lowprec.recipe.recipe import Recipe

_SPLITS = {0: "O", 1: "I"}


class MeshLayer(Protocol):
    """What is used of a ``LowPrecLayer``."""

    recipe: Recipe
    linear_gemms: LinearGemms
    group: LayerGroup | None
    bias: nn.Parameter | None

    @property
    def weight_OI(self) -> torch.Tensor: ...  # noqa: N802 - a shape suffix

    def forward_local(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


_bound: WeakKeyDictionary[MeshLayer, tuple[Any, Any]] = WeakKeyDictionary()  # layer -> mesh, placement of its weight


def _forward_on_mesh(layer: MeshLayer, x: Any) -> Any:
    """The layer's output as a DTensor, from an input that is one on the weight's mesh.

    A weight in Shard(0) (``ColwiseParallel``) takes x replicated and gives y sharded by features; one in Shard(1)
    (``RowwiseParallel``) takes x sharded by features and gives y as a partial sum; a replicated one keeps x replicated.

    Raises:
        UserError: input or weight is no DTensor, on another mesh, on a mesh of several dimensions, or sharded
            otherwise; shards of unequal size, or sizes that the recipe's blocks do not divide; ranks that hold shards
            of one weight would draw differently.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    weight: Any = layer.weight_OI
    _check(layer, x, weight)
    mesh, (placement,), features = weight.device_mesh, weight.placements, x.ndim - 1
    split = "" if placement.is_replicate() else _SPLITS[placement.dim]
    if _bound.get(layer) != (mesh, placement):
        _bind(layer, weight, split)
    taken = Shard(features) if split == "I" else Replicate()
    if x.placements != (taken,):
        x = x.redistribute(placements=(taken,))
    x = x.to_local(grad_placements=(Partial() if split == "O" else taken,))
    bias: Any = layer.bias
    if bias is not None:
        bias = bias.to_local()
        bias = _PartOfSum.apply(bias, mesh.size()) if split == "I" else bias
    y = layer.forward_local(x, weight.to_local(), bias)
    given = {"O": Shard(features), "I": Partial(), "": Replicate()}[split]
    return DTensor.from_local(y, mesh, (given,), run_check=False)


forward_on_mesh = torch.compiler.disable(
    _forward_on_mesh, reason="a megatron_lowprec layer with a weight on a mesh reduces amaxes outside the graph"
)


@once_differentiable("a tensor-parallel layer")
class _PartOfSum(torch.autograd.Function):
    """A replicated bias [O] -> what each rank adds to its partial sum; the gradient is the whole bias's."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, ranks: int) -> torch.Tensor:
        return bias / ranks

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _check(layer: MeshLayer, x: Any, weight: Any) -> None:
    name = layer.linear_gemms.linear_id.name
    if not is_dtensor(weight):
        raise UserError(
            f"{name} got a DTensor, but its weight is a plain tensor: add the layer to the plan of parallelize_module, "
            "or pass it x.to_local()"
        )
    if not is_dtensor(x):
        raise UserError(
            f"the weight of {name} is a DTensor, but its input is a plain tensor: let parallelize_module prepare it, "
            "by ColwiseParallel, RowwiseParallel or PrepareModuleInput"
        )
    found = weight.placements
    if len(found) != 1 or not (found[0].is_replicate() or found[0].is_shard(0) or found[0].is_shard(1)):
        raise UserError(
            f"the weight of {name} is placed as {found}: a converted layer takes a mesh of one dimension, with "
            "Shard(0), Shard(1) or Replicate(); shard other dimensions by fully_shard"
        )
    if x.device_mesh != weight.device_mesh:
        raise UserError(f"{name} got an input on {x.device_mesh}, but its weight is on {weight.device_mesh}")
    if found[0].is_replicate() and not x.placements[0].is_replicate():
        raise UserError(
            f"{name} has a replicated weight and an input placed as {x.placements}: its scales would span the ranks; "
            "redistribute the input to Replicate(), as PrepareModuleInput does"
        )


def _bind(layer: MeshLayer, weight: Any, split: str) -> None:
    """Give the layer the GEMMs of this rank's shard."""
    mesh, gemms = weight.device_mesh, layer.linear_gemms
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    linear_id = replace(gemms.linear_id, data_parallel_rank=_replica(layer, group), split="", spans={})
    if split and ranks > 1:
        size = weight.shape["OI".index(split)]
        _check_sizes(layer, weight, split, ranks)
        spans = {split: ShardSlice(rank * (size // ranks))}
        linear_id = replace(linear_id, split=split, spans=spans)
    layer.linear_gemms = gemms.on_shard(linear_id, maximum_over(group) if linear_id.split else None)
    _bound[layer] = mesh, weight.placements[0]


def _check_sizes(layer: MeshLayer, weight: Any, split: str, ranks: int) -> None:
    linear_id, recipe = layer.linear_gemms.linear_id, layer.linear_gemms.recipe
    size, (out_features, in_features) = weight.shape["OI".index(split)], weight.shape
    asked = f"{linear_id.name} is sharded over {ranks} tensor-parallel ranks"
    kept = f'keep the layer by convert(..., keep_bf16=["{linear_id.name}"]), or shard it over fewer ranks'
    if size % ranks:
        raise UserError(f"{asked}, which do not divide its {size} features: {kept}")
    site = LinearSite(linear_id.layer, linear_id.name, in_features, out_features, "column" if split == "O" else "row")
    found = indivisible(recipe, site, ranks) if recipe.quantized else None
    if found is not None:
        raise UserError(f"{asked}, and under recipe {layer.recipe.name} {' '.join(found)}: {kept}")


def _replica(layer: MeshLayer, shards: dist.ProcessGroup) -> int:
    """The data-parallel rank of this rank, equal on all ranks that hold shards of one weight.

    ``convert`` was given it or a group with one rank of each such mesh, or all ranks: then it is the place of this
    mesh among those of a grid of ranks.
    """
    own, group = layer.linear_gemms.linear_id.data_parallel_rank, layer.group
    if group is None or group.given_rank or not layer.linear_gemms.recipe.random:
        return own
    ranks = dist.get_process_group_ranks(group.ranks or dist.distributed_c10d._get_default_group())
    places = [ranks.index(rank) for rank in dist.get_process_group_ranks(shards) if rank in ranks]
    if len(places) == 1:
        return own
    count, stride, me = shards.size(), places[1] - places[0], ranks.index(dist.get_rank())
    grid = stride > 0 and places[0] // stride % count == 0 and len(ranks) % (stride * count) == 0
    if not grid or places != [places[0] + stride * index for index in range(count)]:
        raise UserError(
            f"ranks {dist.get_process_group_ranks(shards)} hold shards of {layer.linear_gemms.linear_id.name}, but no "
            f"data-parallel rank follows from the group of convert: pass convert(group=...), the ranks with replicas, "
            "such as mesh['dp'].get_group(), or data_parallel_rank=..."
        )
    return me // (stride * count) * stride + me % stride
