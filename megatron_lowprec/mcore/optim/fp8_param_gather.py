"""``--fp8-param-gather``: FP8 primary weights of linear layers, cast from main weights and gathered in FP8.

Megatron-core supports this for TransformerEngine's tensors: byte buffers, their all-gather, main weights beside them.
It recognizes such a tensor by its class and accesses its storage and value through functions of one module.
``register_fp8_weights`` replaces these if the flag is given; it cannot be combined with TransformerEngine's layers.
``quantize_main_weights`` casts the weights after an update; ``optimizer_step`` calls it in place of TransformerEngine's
cast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import partition_buckets as _partition_buckets
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.kernels.dispatch import partial_amax
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.mcore import patches
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.optimizer.adamw import ScaledAdamW
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.primary_weight import Fp8Weight, set_codes, weight_encode_scale
from megatron_lowprec.recipe.coverage import primary_weight_spec
from megatron_lowprec.recipe.schema import QuantSpec


class ScaleGroup(NamedTuple):
    """Inputs of a weight's scale besides its own amax: the attribute ``scaled`` of the parameter.

    Attributes:
        group: ranks that hold the other shards of the tensor and share the scale, None if there are none.
        history: amax history of delayed scaling, and the weight's slot in it.
    """

    group: dist.ProcessGroup | None
    history: tuple[AmaxHistory, int] | None


def register_fp8_weights() -> None:
    """Register ``Fp8Weight`` as Megatron-core's FP8 tensor class, in place of TransformerEngine's."""
    patches.bind(
        "fp8_weights",
        HAVE_TE_FP8_TENSOR_CLASS=True,
        FP8_TENSOR_CLASS=Fp8Weight,
        _modify_underlying_storage_impl=_move_codes,
        te_post_all_gather_processing=None,  # Fp8Weight needs no processing after a gather
        dequantize_fp8_tensor=_dequantize,
    )
    if dist.get_backend() == "gloo":
        patches.bind("bucket_groups", partition_buckets=_partition_by_buffer)


def _dequantize(fp8_tensor: Fp8Weight) -> torch.Tensor:
    return fp8_tensor.value()


def _partition_by_buffer(buffers: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
    """Megatron-core's groups of buckets, restricted to one dtype a group; FP8 weights would otherwise share groups.

    Megatron-core gathers a group by one coalesced call, in which gloo concatenates tensors in the first one's dtype.
    """
    return [group for buffer in buffers for group in _partition_buckets([buffer], *args, **options)]


def _move_codes(weight: Fp8Weight, storage: torch.Tensor) -> None:
    """Move the codes into ``storage``, uint8 [O, I] within the gathered buffer."""
    storage.copy_(weight.codes)
    weight.codes = storage


def use_primary_weights(model_chunks: Sequence[nn.Module], reduce_amax: bool = True) -> int:
    """Convert the weights of linear layers to FP8 where the recipe allows it; returns their number.

    Call it after ``bind_recipe`` and before the chunks are wrapped for data parallelism. The codes are final after the
    optimizer is built and ``finalize`` was called.

    Args:
        reduce_amax: reduce the amax of a tensor's current scale over all tensor-parallel ranks; if False, each rank
            scales its shard by the shard's amax. (A delayed scale always spans them.)
    """
    register_fp8_weights()
    count = 0
    for chunk in model_chunks:
        for module in chunk.modules():
            if not isinstance(module, LowPrecLinearMixin):
                continue
            spec = primary_weight_spec(module.bound_gemms.recipe)
            if spec is None:
                continue
            count += 1
            plain = module.weight
            module.weight = nn.Parameter(Fp8Weight.of(plain.data, spec))
            module.weight.__dict__.update(plain.__dict__)  # attributes that Megatron-core sets on parameters
            delayed = spec.scaling == "delayed"
            # blocks lie within a rank
            shares = spec.block is None and module.tp_group.size() > 1 and (reduce_amax or delayed)
            history = module.bound_gemms.histories["weight"] if delayed else None
            module.weight.scaled = ScaleGroup(module.tp_group if shares else None, history)  # type: ignore[attr-defined]
    return count


class MainShard(NamedTuple):
    """This rank's shard of a main weight.

    Attributes:
        stored: fp32, or codes of the optimizer's format, [entries].
        decode_scale: fp32 [1], multiplies the codes; None for fp32.
    """

    stored: torch.Tensor
    decode_scale: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """fp32 [entries]."""
        return self.stored if self.decode_scale is None else self.stored.float() * self.decode_scale


def sharded_weights(part: Any) -> list[tuple[Fp8Weight, MainShard | None, int]]:
    """(weight, this rank's shard of its main weight or None, the shard's start) of one inner optimizer.

    The order is the same on all ranks.
    """
    if not isinstance(part, DistributedOptimizer) or part.is_stub_optimizer:
        return []
    weights = [weight for buffer in part.buffers for weight in buffer.params if isinstance(weight, Fp8Weight)]
    inner = part.optimizer
    scaled = isinstance(inner, ScaledAdamW)
    shards = part.shard_float16_groups if scaled else part.shard_fp32_from_float16_groups
    here: dict[int, MainShard] = {}
    for weight, shard in zip(chain(*part.model_float16_groups), chain(*shards), strict=True):
        if isinstance(weight, Fp8Weight):
            here[id(weight)] = MainShard(*inner.main_weight(shard)) if scaled else MainShard(shard)
    return [(w, here.get(id(w)), _first_entry(part, w) if id(w) in here else 0) for w in weights]


def _first_entry(part: DistributedOptimizer, weight: Fp8Weight) -> int:
    start: int = part._get_model_param_range_map(weight)["param"].start
    return start


@torch.no_grad()
def quantize_main_weights(part: Any, ahead: bool) -> None:
    """Quantize this rank's shards of the main weights, with scales of whole weights; the caller gathers the codes.

    Args:
        part: one of the optimizers inside Megatron-core's.
        ahead: in a step, before amax histories are updated: use the scale that the update will put in effect.
    """
    found = sharded_weights(part)
    if not found:
        return
    weights = [weight for weight, _, _ in found]
    sizes = [weight.decode_scale.numel() for weight in weights]
    amax = max_over(torch.cat(_amaxes(found)), part.data_parallel_group).split(sizes)
    parts = _max_over_sharers([w.scaled for w in weights], amax)  # type: ignore[attr-defined]
    torch._foreach_copy_([w.main_amax.view(-1) for w in weights], parts)
    encode_scale = torch.cat(_encode_scales(weights, ahead))
    decode_scales = (torch.ones_like(encode_scale) / encode_scale).split(sizes)
    torch._foreach_copy_([w.decode_scale.view(-1) for w in weights], decode_scales)
    encode_scales = encode_scale.split(sizes)
    for batch in _batches(found):
        shards = [(weight, _values(main), start) for weight, main, start in (found[i] for i in batch)]
        set_codes(shards, [encode_scales[i] for i in batch])


def _values(main: MainShard | None) -> torch.Tensor | None:
    return None if main is None else main.values()


def _batches(found: Sequence[tuple[Fp8Weight, MainShard | None, int]]) -> list[list[int]]:
    """Indices of weights to process at once: all fp32 ones, each other alone, since fp32 copies of all might not fit in
    memory.
    """
    narrow = [i for i, (_, main, _) in enumerate(found) if main is not None and main.decode_scale is not None]
    batches = [sorted(set(range(len(found))) - set(narrow)), *([i] for i in narrow)]
    return [batch for batch in batches if batch]


def _amaxes(found: Sequence[tuple[Fp8Weight, MainShard | None, int]]) -> list[torch.Tensor]:
    """Amaxes of each weight over this rank's shard, fp32, one a scale; 0 without an entry."""
    tensors = [main for weight, main, _ in found if weight.spec.block is None]
    of_tensors = iter(_tensor_amaxes(tensors, found[0][0].device))
    of_blocks = iter(_block_amaxes([entry for entry in found if entry[0].spec.block is not None]))
    return [next(of_tensors if weight.spec.block is None else of_blocks) for weight, _, _ in found]


def _block_amaxes(found: Sequence[tuple[Fp8Weight, MainShard | None, int]]) -> list[torch.Tensor]:
    """Amaxes of each weight's blocks over this rank's shard, fp32 [blocks]."""
    amaxes: dict[int, torch.Tensor] = {}
    for batch in _batches(found):
        (block,) = {found[i][0].spec.block for i in batch}
        assert block is not None
        shards = [weight.shard(_values(main), start) for weight, main, start in (found[i] for i in batch)]
        sizes = [found[i][0].decode_scale.numel() for i in batch]
        amaxes.update(zip(batch, partial_amax(shards, block).split(sizes), strict=True))
    return [amaxes[i] for i in range(len(found))]


def _tensor_amaxes(mains: Sequence[MainShard | None], device: torch.device) -> list[torch.Tensor]:
    """Amax of each shard's values, fp32 [1]; 0 for None."""
    held = [main for main in mains if main is not None]
    stored = [main.stored.float() if main.stored.dtype in DTYPES.values() else main.stored for main in held]
    norms = iter(zip(held, torch._foreach_norm(stored, math.inf) if held else (), strict=True))
    amaxes = []
    for main in mains:
        if main is None:
            amaxes.append(torch.zeros(1, device=device))
        else:
            held_main, norm = next(norms)
            scale = held_main.decode_scale
            amaxes.append(norm.float().view(1) if scale is None else norm.float() * scale.view(1))
    return amaxes


def _max_over_sharers(scaled: Sequence[ScaleGroup], amaxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Reduced amaxes of each weight, fp32, by one collective for each group of ranks."""
    parts = list(amaxes)
    for group in dict.fromkeys(s.group for s in scaled if s.group is not None):
        members = [i for i, s in enumerate(scaled) if s.group is group]
        reduced = max_over(torch.cat([parts[i] for i in members]), group)
        for i, part in zip(members, reduced.split([parts[i].numel() for i in members]), strict=True):
            parts[i] = part
    return parts


def _encode_scales(weights: Sequence[Fp8Weight], ahead: bool) -> list[torch.Tensor]:
    """Encode scales of each weight, fp32, one a scale."""
    follows: list[torch.Tensor] = []
    in_effect: dict[int, torch.Tensor] = {}
    by_spec: dict[QuantSpec, list[int]] = {}
    for i, weight in enumerate(weights):
        by_spec.setdefault(weight.spec, []).append(i)
        scaled: ScaleGroup = weight.scaled  # type: ignore[attr-defined]
        if scaled.history is None:
            follows.append(weight.main_amax.view(-1))
            continue
        history, slot = scaled.history
        if id(history) not in in_effect:
            in_effect[id(history)] = history.upcoming() if ahead else history.in_effect
        follows.append(in_effect[id(history)][slot : slot + 1])
    scales: dict[int, torch.Tensor] = {}
    for spec, members in by_spec.items():
        encoded = weight_encode_scale(torch.cat([follows[i] for i in members]), spec)
        scales.update(zip(members, encoded.split([follows[i].numel() for i in members]), strict=True))
    return [scales[i] for i in range(len(weights))]


def finalize(optimizer: Any, model_chunks: Sequence[Any]) -> None:
    """Quantize main weights that did not come from a step: of a new model, a checkpoint, or after loading histories."""
    if not any(sharded_weights(part) for part in optimizer.chained_optimizers):
        return
    for part in optimizer.chained_optimizers:
        quantize_main_weights(part, ahead=False)
    for chunk in model_chunks:
        chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def compute_dtype_weights(optimizer: Any) -> Iterator[tuple[Fp8Weight, torch.Tensor]]:
    """Each FP8 weight and its main weight rounded to the compute dtype, as a model without the flag would hold it.

    All ranks iterate together. Yields [O, I] on the host of the first replica; zeros on other ranks.
    """
    for part in optimizer.chained_optimizers:
        for weight, main, start in sharded_weights(part):
            whole = torch.zeros(weight.numel(), dtype=weight.dtype, device=weight.device)
            if main is not None:
                whole[start : start + main.stored.numel()].copy_(main.values())
            # each byte is nonzero on at most one rank
            dist.all_reduce(whole.view(torch.uint8), group=part.data_parallel_group)
            if part.data_parallel_group.rank():
                whole = torch.zeros(1, dtype=weight.dtype).expand(weight.numel())
            yield weight, whole.cpu().view(weight.shape)
