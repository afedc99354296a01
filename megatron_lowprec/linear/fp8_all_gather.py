"""FSDP2 gathers the weights of converted layers as codes: shards are quantized by the scales of the whole weight.

FSDP2 looks for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` on the local tensor of a sharded parameter. They
are set on the tensors themselves: a tensor subclass would also reach the optimizer and checkpoints.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.backends.protocol import COMPUTE_DTYPES
from megatron_lowprec.linear.lowprec_linear import LowPrecConv1D, LowPrecLayer
from megatron_lowprec.linear.sharding.coded_shard import CodedShard, why_not_coded
from megatron_lowprec.linear.sharding.dtensors import is_dtensor
from megatron_lowprec.linear.sharding.primary_shard import PrimaryShard, set_scales
from megatron_lowprec.linear.sharding.weight_shard import WeightShard
from megatron_lowprec.quantization.forward_pass import is_training_pass
from megatron_lowprec.quantization.frozen_weight import FrozenWeight
from megatron_lowprec.quantization.random_stream import in_backward_pass
from megatron_lowprec.recipe.coverage import LinearSite, indivisible, primary_weight_spec
from megatron_lowprec.recipe.schema import GemmSpec

logger = logging.getLogger("megatron_lowprec")


def enable_fp8_all_gather(model: nn.Module, param_dtype: torch.dtype | None = None) -> None:
    """Let FSDP2 gather weights as the codes that GEMMs take, with the scales that each GEMM would compute.

    Codes and losses keep their bits. Current scales that span shards take one all-reduce of the amaxes of all weights,
    at the beginning of each forward pass of ``model``.

    Call it once, after ``convert``, ``parallelize_module`` and ``fully_shard``, before the first forward pass. Then run
    forward passes by ``model`` itself, not by its parts. Where fprop and dgrad take different codes of one byte an
    entry (``mxfp8``, ``fp8_rowwise``) and weights are gathered in bf16, a forward pass gathers those of fprop and a
    backward pass those of dgrad: FSDP2 must reshard after the forward pass, without activation recomputation. Weights
    that cannot be sent as codes are gathered as before, and those of ``quantize_frozen_weights`` are on each rank; the
    logger ``megatron_lowprec`` names both at level INFO.

    Args:
        model: the root that ``fully_shard`` returned.
        param_dtype: of the ``MixedPrecisionPolicy``; None if it has none.

    Raises:
        UserError: no weight can be sent as codes; weights are not sharded by ``fully_shard`` along their rows, or are
            offloaded to the CPU; the model's are sent as codes already; ``param_dtype`` is not bfloat16 or float32.
    """
    if param_dtype is not None and param_dtype not in COMPUTE_DTYPES:
        raise UserError(
            f"enable_fp8_all_gather was given param_dtype={param_dtype!r}, but recipes compute in bfloat16 or float32: "
            "give the torch.dtype of the MixedPrecisionPolicy"
        )
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LowPrecLayer)}
    if not layers:
        raise UserError("the model has no converted layer: call convert, then fully_shard, then enable_fp8_all_gather")
    if any(layer.gathers_fp8 for layer in layers.values()):
        raise UserError("enable_fp8_all_gather was called for this model before: call it once, on the root")
    found = {path: _shard_of(path, layer, param_dtype) for path, layer in layers.items()}
    shards = [shard for shard in found.values() if isinstance(shard, WeightShard)]
    kept: dict[str, list[str]] = {}
    for path, reason in found.items():
        if isinstance(reason, str):
            kept.setdefault(reason, []).append(path)
    if not shards:
        recipe = next(iter(layers.values())).recipe.name
        raise UserError(
            f"enable_fp8_all_gather can send no weight as codes under recipe {recipe}: {'; '.join(kept)}. Leave it out"
        )
    _Gather(shards, param_dtype).attach(model)
    for reason, paths in kept.items():
        logger.info("not gathered as codes, %s: %s", reason, ", ".join(paths))


def _shard_of(path: str, layer: LowPrecLayer, param_dtype: torch.dtype | None) -> WeightShard | str:
    """The shard of a layer's weight, or the reason why it is not gathered as codes.

    Raises:
        UserError: the weight is not sharded by ``fully_shard`` along its rows, or is offloaded to the CPU.
    """
    recipe = layer.linear_gemms.recipe
    if not recipe.quantized:
        return "not quantized"
    if isinstance(layer, LowPrecConv1D):
        return "stored transposed"
    if isinstance(layer.weight, FrozenWeight):
        return "held as codes already"
    if (why := why_not_coded(recipe)) is not None:
        return why
    if not is_dtensor(layer.weight.data):
        raise UserError(f"{path}.weight is not sharded: call fully_shard(model), then enable_fp8_all_gather(model)")
    dtype = param_dtype or layer.weight.dtype
    spec = primary_weight_spec(recipe)
    if spec is not None:
        return PrimaryShard(path, layer, dtype, spec)
    shard = CodedShard(path, layer, dtype)
    ranks, (rows, columns) = shard.group.size(), shard.shape
    if rows % ranks:
        return f"{rows} rows do not divide over {ranks} ranks"
    site = LinearSite(layer.linear_gemms.linear_id.layer, path, columns, rows, "column")
    sent = replace(recipe, wgrad=GemmSpec(), dgrad=GemmSpec() if shard.requantizes else recipe.dgrad)
    found = indivisible(sent, site, ranks)
    if found is not None:
        return f"shards cut blocks: {' '.join(found)}"
    if shard.bytes >= shard.rows * columns * dtype.itemsize:
        return "its codes take as many bytes as its values"
    return shard


class _Gather:
    """The weights of one model; scales of all are computed at once."""

    def __init__(self, shards: Sequence[WeightShard], param_dtype: torch.dtype | None) -> None:
        self._shards, self._dtype = shards, param_dtype
        self._computed: torch.cuda.Event | None = None

    def attach(self, model: nn.Module) -> None:
        """Set FSDP2's hooks, and compute scales before each forward pass, ahead of FSDP2's own hook."""
        for shard in self._shards:
            hooks: Any = shard.shard
            hooks.fsdp_pre_all_gather = self._sender(shard)
            hooks.fsdp_post_all_gather = _receiver(shard)
            shard.layer.gathers_fp8 = True
        model.register_forward_pre_hook(self._compute_scales, prepend=True)

    def _compute_scales(self, model: nn.Module, _: Any) -> None:
        training = is_training_pass(model.training)
        for shard in self._shards:
            if shard.layer.group is not None:
                shard.layer.group.begin_pass(training)
        for shard in self._shards:
            shard.begin_pass(training)
        with torch.no_grad():
            self._compute()

    def _compute(self) -> None:
        found = [shard.amaxes(norm) for shard, norm in zip(self._shards, self._norms(), strict=True)]
        whole = iter(_reduced([each for amaxes in found for each in amaxes]))
        for shard, amaxes in zip(self._shards, found, strict=True):
            shard.set_amaxes([amax for amax, _ in amaxes], [next(whole) for _ in amaxes])
            shard.scaled_version = shard.version
        set_scales(shard for shard in self._shards if isinstance(shard, PrimaryShard))
        if self._shards[0].shard.is_cuda:  # FSDP2 quantizes and gathers on streams of its own
            self._computed = torch.cuda.Event()
            self._computed.record()

    def _norms(self) -> Sequence[torch.Tensor]:
        """Amaxes of the shards, fp32 [1]; rounding is monotonic, so they are those of the rounded weights."""
        shards = [each.shard for each in self._shards]
        held = [shard for shard in shards if shard.numel()]
        own = iter(torch._foreach_norm(held, math.inf) if held else ())
        zero = torch.zeros((), dtype=shards[0].dtype, device=shards[0].device)
        norms = torch.stack([next(own) if shard.numel() else zero for shard in shards])
        return norms.to(self._dtype or norms.dtype).float().split(1)

    def _sender(self, shard: WeightShard) -> Any:
        def fsdp_pre_all_gather(
            mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
        ) -> tuple[tuple[torch.Tensor, ...], bool]:
            if mp_policy.param_dtype != self._dtype:
                raise UserError(
                    f"enable_fp8_all_gather has param_dtype {self._dtype}, but the MixedPrecisionPolicy of "
                    f"{shard.path} has {mp_policy.param_dtype}: pass param_dtype={mp_policy.param_dtype}"
                )
            if shard.version != shard.scaled_version:
                raise UserError(
                    f"{shard.path}.weight is gathered outside of a forward pass of the whole model, and its FP8 scale "
                    f"is not up to date: call the model that enable_fp8_all_gather was given"
                )
            if self._computed is not None:
                torch.cuda.current_stream().wait_event(self._computed)
            backward = in_backward_pass()
            return (shard.pack(backward),), backward

        return fsdp_pre_all_gather


def _receiver(shard: WeightShard) -> Any:
    def fsdp_post_all_gather(
        outputs: tuple[torch.Tensor], backward: bool, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor]] | None:
        (gathered,) = outputs
        local = out._local_tensor if is_dtensor(out) else out
        weight = shard.receive(gathered, backward, local)
        return (weight, (gathered,)) if out is None else None

    return fsdp_post_all_gather


def _reduced(amaxes: Sequence[tuple[torch.Tensor, Sequence[dist.ProcessGroup]]]) -> list[torch.Tensor]:
    """Maxima of amaxes over their groups of ranks, by one collective for each group."""
    parts = [amax for amax, _ in amaxes]
    for group in dict.fromkeys(group for _, groups in amaxes for group in groups):
        members = [index for index, (_, groups) in enumerate(amaxes) if group in groups]
        reduced = max_over(torch.cat([parts[index] for index in members]), group)
        for index, part in zip(members, reduced.split([parts[index].numel() for index in members]), strict=True):
            parts[index] = part
    return parts
