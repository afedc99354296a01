"""Megatron-core's distributed optimizer around ``ScaledAdamW``.

Megatron-core supports optimizers that hold the main weights, for TransformerEngine's: it passes them the model's
weights and gradients directly and checkpoints a decoded state. ``keeps_main_weights`` selects this path;
``use_scaled_adam`` then replaces the optimizer that Megatron-core has built. The checkpoint holds an fp32 state, so
that any recipe and layout loads it.

FP8-LM assigns each whole tensor to one rank, so that its scale is local. Here tensors are sharded evenly, as
Megatron-core does, and one max-reduction over all tensors computes the scales. The numerics are the same; no rank waits
for the one with the embedding, and Megatron-core's overlapped gathers still work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_lowprec.comm.maximum import maximum_over
from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.philox.reference import VALUES_PER_CALL, ShardSlice
from megatron_lowprec.kernels.scaled_adam.reference import Stream
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.optimizer.adamw import Place, ScaledAdamW
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import optimizer_key
from megatron_lowprec.recipe.recipe import OptimizerSpec

_EXPERT = re.compile(r"\.local_experts\.(\d+)")


def keeps_main_weights(options: OptimizerConfig) -> None:
    """Set this before the optimizer is built. Megatron-core's own flag would require TransformerEngine's Adam."""
    options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def use_scaled_adam(
    optimizer: MegatronOptimizer, spec: OptimizerSpec, model_chunks: Sequence[nn.Module], seed: int
) -> None:
    """Replace Adam inside each part of Megatron-core's optimizer; its weights become the main weights.

    Raises:
        UserError: stochastic rounding of a weight whose rows tensor parallelism does not split at multiples of 8.
    """
    names = weight_names(model_chunks) if spec.rounding == "stochastic" else None
    device = next(model_chunks[0].parameters()).device  # a part without weights has no buffer
    for part in optimizer.chained_optimizers:
        assert isinstance(part, DistributedOptimizer)
        if part.is_stub_optimizer:
            continue
        rows = {weight: i for i, weight in enumerate(w for buffer in part.buffers for w in buffer.params)}
        _shard_fp8_weights(part)
        places: dict[torch.Tensor, Place] = {}
        for model, shards in (
            (part.model_float16_groups, part.shard_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for weights, parts in zip(model, shards, strict=True):
                for weight, shard in zip(weights, parts, strict=True):
                    entries, stream = part._get_model_param_range_map(weight)["param"], None
                    if names is not None and weight.dim() > 1:
                        stream = rounding_stream(weight, names[weight], seed, entries.start)
                    values = partial(_values, weight, entries) if isinstance(weight, Fp8Weight) else None
                    places[shard] = Place(rows[weight], weight.dim() == 1, stream, values)
        inner = part.optimizer
        scaled = ScaledAdamW(
            inner.param_groups,
            inner.defaults,
            spec,
            places,
            torch.zeros(len(rows), 3, device=device),
            maximum_over(*_sharers(part)),
        )
        bind(
            "optimizer_state", part, optimizer=scaled, _copy_model_params_to_main_params=partial(_read_weights, scaled)
        )


def _read_weights(scaled: ScaledAdamW, state_dict: Any = None) -> None:
    """Replacement of ``DistributedOptimizer._copy_model_params_to_main_params``, which leaves it to the optimizer."""
    scaled.read_weights()


def _shard_fp8_weights(part: DistributedOptimizer) -> None:
    """Give FP8 weights, of which Megatron-core makes no shards, this rank's part of their codes, uint8 [entries]."""
    groups = zip(part.model_float16_groups, part.shard_float16_groups, part.optimizer.param_groups, strict=True)
    for weights, shards, group in groups:
        fp32 = len(group["params"]) - len(shards)  # which come first
        for i, weight in enumerate(weights):
            if isinstance(weight, Fp8Weight):
                entries = part._get_model_param_range_map(weight)["param"]
                shard = weight.codes.view(-1)[entries.start : entries.end]
                copy_tensor_model_parallel_attributes(shard, weight)
                if hasattr(weight, "shared"):
                    shard.shared = weight.shared  # type: ignore[attr-defined]
                shards[i] = group["params"][fp32 + i] = shard


def _values(weight: Fp8Weight, entries: Any) -> torch.Tensor:
    """The entries of an FP8 weight, in the compute dtype: the values that it was set to, before they were quantized."""
    return weight.value().view(-1)[entries.start : entries.end]


def weight_names(model_chunks: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """Each weight's name in the whole model, by global layer and expert numbers; copies of a weight share it."""
    names: dict[nn.Parameter, str] = {}
    for chunk in unwrap_model(list(model_chunks)):
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer):
                experts = getattr(layer.mlp, "local_expert_indices", ())
                for name, weight in layer.named_parameters():
                    local = _EXPERT.search(name)
                    name = name if local is None else _EXPERT.sub(f".experts.{experts[int(local[1])]}", name)
                    names[weight] = f"layers.{layer.layer_number}.{name}"
        for name, weight in chunk.named_parameters():
            shared = getattr(weight, "shared_embedding", False)  # the last pipeline stage's copy
            names.setdefault(weight, "embedding.word_embeddings.weight" if shared else name)
    return names


def rounding_stream(weight: nn.Parameter, name: str, seed: int, first: int) -> Stream:
    """Random stream for the shard of ``weight`` that begins at its entry ``first``, the same on every layout.

    Args:
        weight: this tensor-parallel rank's shard of a tensor of two dimensions or more.
        name: as ``weight_names`` returns it.

    Raises:
        UserError: tensor parallelism splits rows at other than multiples of 8.
    """
    key, (lines, columns) = optimizer_key(seed, name), (weight.shape[0], weight[0].numel())
    group = tensor_parallel_group(weight)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    if size > 1 and columns % VALUES_PER_CALL:
        raise UserError(
            f"optimizer.rounding stochastic: {name} has rows of {columns} entries on each of {size} tensor-parallel "
            f"ranks, no multiple of {VALUES_PER_CALL}: change that size, or set optimizer.rounding=nearest_even"
        )
    if size == 1:  # as one row, whose length is free
        return Stream(key, columns=weight.numel(), first=first)
    if weight.partition_dim == 1:  # type: ignore[attr-defined]
        return Stream(key, columns, first, whole_columns=columns * size, first_column=columns * rank)
    part = lines // weight.partition_stride  # type: ignore[attr-defined]  # gate and up projection
    rows = (
        ShardSlice(rank * part, gate_offset=part, gate_stride=part * (size - 1))
        if part < lines
        else ShardSlice(rank * part)
    )
    return Stream(key, columns, first, whole_columns=columns, rows=rows)


def tensor_parallel_group(weight: nn.Parameter) -> dist.ProcessGroup | None:
    """The ranks that share a weight's rows or columns; None if one holds them all."""
    if not getattr(weight, "tensor_model_parallel", False):
        return None
    expert = not getattr(weight, "allreduce", True)
    group = mpu.get_expert_tensor_parallel_group() if expert else mpu.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None


def scaled_adams(optimizer: MegatronOptimizer) -> list[ScaledAdamW]:
    """The ``ScaledAdamW`` instances inside Megatron-core's optimizer; empty with another optimizer."""
    parts = optimizer.chained_optimizers
    return [part.optimizer for part in parts if isinstance(getattr(part, "optimizer", None), ScaledAdamW)]


def _sharers(part: DistributedOptimizer) -> list[dist.ProcessGroup]:
    """Groups of ranks that hold parts of the same tensors: the data-parallel and the tensor-parallel group."""
    experts = any(not getattr(weight, "allreduce", True) for buffer in part.buffers for weight in buffer.params)
    tensor = mpu.get_expert_tensor_parallel_group() if experts else mpu.get_tensor_model_parallel_group()
    return [group for group in (part.data_parallel_group, tensor) if group.size() > 1]
