"""Shards whose FP8 codes serve both GEMMs, by fp32 scales of the tensor or of square blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.dispatch import multi_tensor_cast_, partial_amax, partial_cast_
from megatron_lowprec.kernels.gemm.native import SCALE_ALIGNMENT
from megatron_lowprec.kernels.partial_cast.reference import Shard
from megatron_lowprec.linear.lowprec_linear import LowPrecLayer
from megatron_lowprec.linear.sharding.weight_shard import WeightShard
from megatron_lowprec.quantization.primary_weight import Fp8Weight, weight_encode_scale
from megatron_lowprec.recipe.schema import QuantSpec

_SCALES_APART = SCALE_ALIGNMENT // 4


class PrimaryShard(WeightShard):
    """FP8 codes that fprop and dgrad share, by fp32 scales of the tensor or of square blocks.

    Scales follow from the reduced amaxes, so blocks may cross shards and no scale is sent.

    Attributes:
        spec: of the weight.
        amax: fp32, of this rank's shard under one scale for the tensor, else of the blocks.
        scaled_amax: fp32, from which the scales follow.
        encode_scale, decode_scale: fp32, of the shape of ``scaled_amax``.
    """

    def __init__(self, path: str, layer: LowPrecLayer, dtype: torch.dtype, spec: QuantSpec) -> None:
        super().__init__(path, layer, dtype)
        self.spec, self._delayed = spec, False
        self.encode_scale = self.decode_scale = self.amax = self.scaled_amax = torch.empty(0)

    def begin_pass(self, training: bool) -> None:
        """As ``WeightShard``: whether the scale is delayed."""
        self._delayed = self.spec.scaling == "delayed" and "weight" not in self.layer.current_tensors(training)

    def amaxes(self, norm: torch.Tensor) -> list[tuple[torch.Tensor, tuple[dist.ProcessGroup, ...]]]:
        """As ``WeightShard``: of the tensor, or of each block."""
        if self.spec.block is None:
            return [(norm, () if self._delayed else self._groups)]
        values = self.values().float().view(-1)
        return [(partial_amax([self._part(values)], self.spec.block), (self.group,))]

    def set_amaxes(self, own: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
        """As ``WeightShard``; ``set_scales`` follows."""
        (self.amax,), (self.scaled_amax,) = own, whole  # delayed amaxes meet those of other ranks after the step
        if self._delayed:
            history, slot = self.layer.linear_gemms.histories["weight"]
            self.scaled_amax = history.in_effect[slot : slot + 1].to(self.amax.device)
        if self.spec.block is not None:
            blocks = Shard(self.scaled_amax, 0, (self.shape[0], self.shape[1])).blocks(self.spec.block)
            self.amax = self.scaled_amax = self.scaled_amax.view(blocks)

    def pack(self, backward: bool) -> torch.Tensor:
        """As ``WeightShard``: [rows, I]."""
        codes = torch.zeros(self.rows, self.shape[1], dtype=torch.uint8, device=self.shard.device)
        if not self.shard.numel():
            return codes
        held, fmt = codes[: len(self.shard)], FORMATS[self.spec.format]
        values = self.values().float()
        if self.spec.block is None:
            multi_tensor_cast_([values], self.encode_scale, fmt, [held])
        else:
            into = [held.view(-1)]
            partial_cast_([self._part(values.view(-1))], self.encode_scale.view(-1), fmt, self.spec.block, into)
        return codes

    def receive(self, gathered: torch.Tensor, backward: bool, out: Any) -> Any:
        """As ``WeightShard``."""
        if out is not None:  # the codes are in its memory
            out.decode_scale, out.main_amax = self.decode_scale, self.amax
            return out
        return Fp8Weight(gathered[: self.shape[0]], self.decode_scale, self.amax, self.spec, self.dtype)

    def _part(self, values: torch.Tensor) -> Shard:
        return Shard(values, self.start * self.shape[1], (self.shape[0], self.shape[1]))


def set_scales(shards: Iterable[PrimaryShard]) -> None:
    """Scales of many weights, in few launches, after ``set_amaxes``; each weight's begin where cuBLAS takes them."""
    by_spec: dict[QuantSpec, list[PrimaryShard]] = {}
    for shard in shards:
        by_spec.setdefault(shard.spec, []).append(shard)
    for spec, members in by_spec.items():
        amaxes = [shard.scaled_amax for shard in members]
        ones = amaxes[0].new_ones(_SCALES_APART)
        sizes = [(amax.numel(), -amax.numel() % _SCALES_APART) for amax in amaxes]
        padded = [part for amax, (_, gap) in zip(amaxes, sizes, strict=True) for part in (amax.view(-1), ones[:gap])]
        encode = weight_encode_scale(torch.cat(padded), spec)
        parts = [size for pair in sizes for size in pair]
        scales = zip(encode.split(parts)[::2], (torch.ones_like(encode) / encode).split(parts)[::2], strict=True)
        for shard, amax, (to_codes, from_codes) in zip(members, amaxes, scales, strict=True):
            shard.encode_scale, shard.decode_scale = to_codes.view_as(amax), from_codes.view_as(amax)
