"""FSDP2 gathers the weights of converted layers as FP8 codes: shards are quantized by the scale of the whole weight.

FSDP2 looks for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` on the local tensor of a sharded parameter. They
are set on the tensors themselves: a tensor subclass would also reach the optimizer and checkpoints.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.dispatch import multi_tensor_cast_
from megatron_lowprec.linear.lowprec_linear import LowPrecConv1D, LowPrecLayer
from megatron_lowprec.quantization.forward_pass import is_training_pass
from megatron_lowprec.quantization.primary_weight import Fp8Weight, weight_encode_scale
from megatron_lowprec.recipe.coverage import primary_weight_spec
from megatron_lowprec.recipe.schema import QuantSpec

logger = logging.getLogger("megatron_lowprec")


def enable_fp8_all_gather(model: nn.Module, param_dtype: torch.dtype | None = None) -> None:
    """Let FSDP2 gather weights as FP8 codes, one byte an entry, with the scale that each GEMM would compute.

    Codes and losses keep their bits. Under current scaling, each forward pass of ``model`` begins with one all-reduce
    of the amaxes of all weights. Under delayed scaling the scales are known.

    Call it once, after ``convert`` and ``fully_shard``, before the first forward pass. Then run forward passes by
    ``model`` itself, not by its parts. Layers that stay in bf16, and ``Conv1D``, which stores its weight transposed,
    are gathered as before; the logger ``megatron_lowprec`` names the latter at level INFO.

    Args:
        model: the root that ``fully_shard`` returned.
        param_dtype: of the ``MixedPrecisionPolicy``; None if it has none.

    Raises:
        UserError: the recipe has no weight with one scale per tensor, the same in fprop and dgrad; weights are not
            sharded by ``fully_shard`` along their rows; weights are offloaded to the CPU.
    """
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LowPrecLayer)}
    if not layers:
        raise UserError("the model has no converted layer: call convert, then fully_shard, then enable_fp8_all_gather")
    transposed = [path for path, layer in layers.items() if isinstance(layer, LowPrecConv1D)]
    weights = [
        _Weight(path, layer, spec)
        for path, layer in layers.items()
        if path not in transposed
        and (spec := primary_weight_spec(layer.linear_gemms.recipe)) is not None
        and spec.block is None
    ]
    if not weights:
        recipe = next(iter(layers.values())).recipe.name
        raise UserError(
            f"enable_fp8_all_gather needs nn.Linear weights with one scale per tensor, the same in fprop and dgrad; "
            f"recipe {recipe} has none here. fp8_current and fp8_delayed have them; FSDP2's shards cut "
            "the blocks of fp8_blockwise"
        )
    _Gather(weights, param_dtype).attach(model)
    if transposed:
        logger.info("gathered in the compute dtype, stored transposed: %s", ", ".join(transposed))


class _Weight:
    """A sharded weight, and its scale for the forward pass and backward pass in progress."""

    def __init__(self, path: str, layer: LowPrecLayer, spec: QuantSpec) -> None:
        sharded: Any = layer.weight
        if type(sharded.data).__name__ != "DTensor":
            raise UserError(f"{path}.weight is not sharded: call fully_shard(model), then enable_fp8_all_gather(model)")
        dims = [dim for dim, placement in enumerate(sharded.placements) if not placement.is_replicate()]
        if len(dims) != 1 or not sharded.placements[dims[0]].is_shard(0):
            raise UserError(f"{path}.weight is placed as {sharded.placements}; an FP8 all-gather needs one Shard(0)")
        self.path, self.layer, self.spec = path, layer, spec
        self.group: dist.ProcessGroup = sharded.device_mesh.get_group(dims[0])
        self.shard: torch.Tensor = sharded._local_tensor
        self._sharded = sharded
        if self.shard.device.type == "cpu" and self.shard.is_pinned():
            raise UserError(f"{path}.weight is offloaded to the CPU, which an FP8 all-gather does not support")
        self.scaled_version, self.delayed = -1, False
        self.encode_scale = self.decode_scale = self.amax = torch.empty(0)

    @property
    def version(self) -> int:
        """Changes with the values: an optimizer's write is counted only by the DTensor."""
        return int(self._sharded._version) + self.shard._version


class _Gather:
    """The weights of one model; scales of all are computed at once."""

    def __init__(self, weights: Sequence[_Weight], param_dtype: torch.dtype | None) -> None:
        self._weights, self._dtype = weights, param_dtype
        self._computed: torch.cuda.Event | None = None

    def attach(self, model: nn.Module) -> None:
        """Set FSDP2's hooks, and compute scales before each forward pass, ahead of FSDP2's own hook."""
        for weight in self._weights:
            hooks: Any = weight.shard
            hooks.fsdp_pre_all_gather = self._quantizer(weight)
            hooks.fsdp_post_all_gather = self._receiver(weight)
            weight.layer.gathers_fp8 = True
        model.register_forward_pre_hook(self._compute_scales, prepend=True)

    def _compute_scales(self, model: nn.Module, _: Any) -> None:
        training = is_training_pass(model.training)
        for layer in (weight.layer for weight in self._weights):
            if layer.group is not None:
                layer.group.begin_pass(training)
        for weight in self._weights:
            weight.delayed = weight.spec.scaling == "delayed" and "weight" not in weight.layer.current_tensors(training)
        with torch.no_grad():
            self._compute()

    def _compute(self) -> None:
        shards = [weight.shard for weight in self._weights]
        held = [shard for shard in shards if shard.numel()]
        own = iter(torch._foreach_norm(held, math.inf) if held else ())
        zero = torch.zeros((), dtype=shards[0].dtype, device=shards[0].device)
        amax = torch.stack([next(own) if shard.numel() else zero for shard in shards])
        amax = amax.to(self._dtype or amax.dtype).float()  # rounding is monotonic: the amax of the rounded weight
        whole = amax.clone()
        current = [index for index, weight in enumerate(self._weights) if not weight.delayed]
        for group in dict.fromkeys(self._weights[index].group for index in current):
            of_group = [index for index in current if self._weights[index].group is group]
            whole[of_group] = max_over(amax[of_group], group)
        for index, weight in enumerate(self._weights):
            # the amaxes of delayed scaling meet those of other ranks at the end of the step
            weight.amax = amax[index : index + 1]
            used = whole[index : index + 1]
            if weight.delayed:
                history, slot = weight.layer.linear_gemms.histories["weight"]
                used = history.in_effect[slot : slot + 1].to(amax.device)
            weight.encode_scale = weight_encode_scale(used, weight.spec)
            weight.decode_scale = torch.ones_like(weight.encode_scale) / weight.encode_scale
            weight.scaled_version = weight.version
        if amax.is_cuda:  # FSDP2 quantizes and gathers on streams of its own
            self._computed = torch.cuda.Event()
            self._computed.record()

    def _quantizer(self, weight: _Weight) -> Any:
        def fsdp_pre_all_gather(
            mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
        ) -> tuple[tuple[torch.Tensor, ...], None]:
            if mp_policy.param_dtype != self._dtype:
                raise UserError(
                    f"enable_fp8_all_gather has param_dtype {self._dtype}, but the MixedPrecisionPolicy of "
                    f"{weight.path} has {mp_policy.param_dtype}: pass param_dtype={mp_policy.param_dtype}"
                )
            if weight.version != weight.scaled_version:
                raise UserError(
                    f"{weight.path}.weight is gathered outside of a forward pass of the whole model, and its FP8 scale "
                    f"is not up to date: call the model that enable_fp8_all_gather was given"
                )
            if self._computed is not None:
                torch.cuda.current_stream().wait_event(self._computed)
            shard = weight.shard
            rows = -(-outer_size[0] // mesh.size())  # FSDP2 pads the last shards
            codes = torch.zeros(rows, outer_size[1], dtype=torch.uint8, device=shard.device)
            if shard.numel():
                values = shard.to(self._dtype or shard.dtype).float().contiguous()
                multi_tensor_cast_([values], weight.encode_scale, FORMATS[weight.spec.format], [codes[: len(shard)]])
            return (codes,), None

        return fsdp_pre_all_gather

    def _receiver(self, weight: _Weight) -> Any:
        size = weight.layer.weight.shape

        def fsdp_post_all_gather(
            outputs: tuple[torch.Tensor], metadata: None, param_dtype: torch.dtype, *, out: Any = None
        ) -> tuple[torch.Tensor, tuple[torch.Tensor]] | None:
            (codes,) = outputs
            if out is not None:  # the codes are in its memory
                out.decode_scale, out.main_amax = weight.decode_scale, weight.amax
                return None
            whole = Fp8Weight(codes[: size[0]], weight.decode_scale, weight.amax, weight.spec, param_dtype)
            return whole, (codes,)

        return fsdp_post_all_gather
