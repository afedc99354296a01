"""Shards of codes and scales as a backend casts them, of one GEMM or of both."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from megatron_lowprec.kernels.quantize.reference import block_amax
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.linear.lowprec_linear import LowPrecLayer
from megatron_lowprec.linear.sharding.gathered_weight import GatheredWeight
from megatron_lowprec.linear.sharding.weight_shard import WeightShard
from megatron_lowprec.quantization.random_stream import NO_DRAWS
from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes
from megatron_lowprec.quantization.token_rows import stored_codes
from megatron_lowprec.recipe.coverage import primary_weight_spec
from megatron_lowprec.recipe.fp8_dispatch import code_bytes
from megatron_lowprec.recipe.schema import GemmSpec, LinearRecipe, QuantSpec
from megatron_lowprec.scaling import granularity_of

_CODES = {
    False: CastRequest(True, False, update_amax=False, codes=True),
    True: CastRequest(False, True, update_amax=False, codes=True),
}


class CodedShard(WeightShard):
    """Codes and scales as a backend's cast gives them, for fprop and dgrad.

    Codes that the transpose shares serve both, and so do codes of fprop whose values dgrad quantizes again. Else both
    directions are sent, or, where that is no less than the weight itself, the direction of the pass: then FSDP2 must
    gather before each.

    Attributes:
        directions: the GEMMs whose codes are sent, in a forward pass and in a backward pass.
        bytes: that this rank sends for a pass.
        gemms: those whose codes the last all-gather brought.
        requantizes: dgrad takes the values of fprop's codes.
    """

    def __init__(self, path: str, layer: LowPrecLayer, dtype: torch.dtype) -> None:
        super().__init__(path, layer, dtype)
        recipe = layer.linear_gemms.recipe
        self._specs: dict[str, QuantSpec] = {gemm: _weight_spec(recipe, gemm) for gemm in SIDES["weight"]}
        by_row, by_column = (self._specs[gemm] for gemm in SIDES["weight"])
        self._shared = by_row == by_column and by_row.shares_directions
        self.requantizes = _requantizes(recipe.dgrad)
        self._amaxes = dict[str, torch.Tensor]()
        splits = zip("O" + self.split, self._groups, strict=True)
        shards = [(replace(layer.linear_gemms.linear_id, split=split, spans={}), group) for split, group in splits]
        # GEMM -> the ranks that share the scales of its operand
        self._sharers: dict[str, tuple[dist.ProcessGroup, ...]] = {}
        self._cast = {}
        for gemm, spec in self._specs.items():
            if gemm == "dgrad" and self.requantizes:
                continue
            sharing = [(shard, group) for shard, group in shards if shard.shares_scale(gemm, "weight", spec)]
            (shard, _), reduce = (sharing or shards)[0], None
            if sharing:
                self._sharers[gemm] = tuple(group for _, group in sharing)
                reduce = partial(self._whole_amax, gemm)
            self._cast[gemm] = layer.linear_gemms.on_shard(shard, reduce)
        sizes = {gemm: self._bytes(gemm) for gemm in SIDES["weight"]}
        self.directions: tuple[tuple[str, ...], tuple[str, ...]]
        if self._shared or self.requantizes:
            self.directions = (("fprop",), ("fprop",))
        elif sum(sizes.values()) < self.rows * self.shape[1] * dtype.itemsize:
            self.directions = (SIDES["weight"], SIDES["weight"])
        else:
            self.directions = (("fprop",), ("dgrad",))
        self.bytes = max(sum(sizes[gemm] for gemm in gemms) for gemms in self.directions)
        self._tensor_scales = dict[str, torch.Tensor | None]()
        self.gemms: tuple[str, ...] = ()
        self._gathered = torch.empty(0)

    def amaxes(self, norm: torch.Tensor) -> list[tuple[torch.Tensor, tuple[dist.ProcessGroup, ...]]]:
        """As ``WeightShard``: of each direction whose scales span ranks, of the tensor or of its rows."""
        found = []
        for gemm, groups in self._sharers.items():
            amax = norm
            if not self._specs[gemm].has_tensor_amax:
                operand = self.values() if gemm == "fprop" else self.values().t()
                amax = block_amax(operand, (1, operand.shape[1])).view(-1)
            found.append((amax, groups))
        return found

    def set_amaxes(self, own: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
        """As ``WeightShard``."""
        self._amaxes = dict(zip(self._sharers, whole, strict=True))

    def _whole_amax(self, gemm: str, amax: torch.Tensor) -> torch.Tensor:
        """In place of a reduction: the amax in the shape of a shard's."""
        whole = self._amaxes[gemm]
        return whole.expand(amax.shape) if whole.numel() == 1 else whole.view(amax.shape)

    def pack(self, backward: bool) -> torch.Tensor:
        """As ``WeightShard``: codes and scales of one direction after the other, [bytes]."""
        values, parts = self.values(), []
        for gemm in self.directions[backward]:
            backends, columnwise = self._cast[gemm].backends, gemm == "dgrad"
            backends.resolve(values)
            cast, _ = backends.resolved.gemms[gemm].quantize("weight", values, NO_DRAWS, _CODES[columnwise])
            data, scale = cast.columnwise() if columnwise else cast.rowwise()
            self._tensor_scales[gemm] = cast.columnwise_tensor_scale if columnwise else cast.rowwise_tensor_scale
            assert scale is not None
            # a native cast pads both for its own GEMM
            data, scale = (each[:r, :c] for each, (r, c) in zip((data, scale), self._shapes(gemm), strict=True))
            codes = QuantizedTensor(data.shape, self.dtype, self._specs[gemm], data, scale)
            packed = codes.packed_codes if codes.format.bits == 4 else data.contiguous().view(torch.uint8)
            parts += [packed.flatten(), scale.contiguous().view(torch.uint8).flatten()]
        sent = torch.cat(parts)
        assert sent.numel() <= self.bytes
        return pad(sent, (0, self.bytes - sent.numel()))

    def receive(self, gathered: torch.Tensor, backward: bool, out: Any) -> Any:
        """As ``WeightShard``; codes are unpacked for each GEMM, since FSDP2 frees only what it gathered."""
        # FSDP2's stream has made them: it must not write there before this one has read
        for scale in self._tensor_scales.values():
            if scale is not None and scale.is_cuda:
                scale.record_stream(torch.cuda.current_stream(scale.device))
        self._gathered, self._sent = gathered, self.directions[backward]
        self.gemms = SIDES["weight"] if self._shared else self._sent
        return GatheredWeight(self, self.shape, self.dtype, gathered.device) if out is None else out

    def codes(self, gemm: str) -> QuantizedTensor:
        """As ``Gathered``."""
        if not self._shared:
            return self._joined(gemm)
        whole = self._joined("fprop")
        if gemm == "fprop":
            return whole
        data, scale = whole.rowwise()
        assert scale is not None
        turned = QuantizedTensor(torch.Size(self.shape[::-1]), self.dtype, whole.spec)
        turned.rowwise_data, turned.rowwise_scale = data.t().contiguous(), scale.t().contiguous()
        turned.rowwise_tensor_scale = whole.rowwise_tensor_scale
        return turned

    def _shapes(self, gemm: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of a shard's operand and of its scales."""
        rows, columns = (self.rows, self.shape[1]) if gemm == "fprop" else (self.shape[1], self.rows)
        spec = self._specs[gemm]
        down, across = block_sizes(spec, torch.empty(rows, columns, device="meta"))
        return (rows, columns), (-(-rows // down), -(-columns // across))

    def _bytes(self, gemm: str) -> int:
        (rows, columns), scales = self._shapes(gemm)
        spec = self._specs[gemm]
        return rows * code_bytes(spec, columns) + math.prod(scales) * (4 if spec.scale_format == "fp32" else 1)

    def _joined(self, gemm: str) -> QuantizedTensor:
        """Rowwise codes of a GEMM's operand, joined of the shards'."""
        (rows, columns), scales = self._shapes(gemm)
        spec, dim = self._specs[gemm], 0 if gemm == "fprop" else 1
        first = sum(self._bytes(other) for other in self._sent[: self._sent.index(gemm)])
        ranks = self._gathered.view(self.group.size(), self.bytes)[:, first : first + self._bytes(gemm)]
        width = code_bytes(spec, columns)
        data = stored_codes(_join(ranks[:, : rows * width].reshape(-1, rows, width), dim), spec, self.dtype)
        scale = ranks[:, rows * width :].clone(memory_format=torch.contiguous_format)  # at an address that fp32 has
        scale = (scale.view(torch.float32) if spec.scale_format == "fp32" else scale).view(-1, *scales)
        granularity = granularity_of(spec.granularity)
        spans_ranks = (granularity.rows, granularity.columns)[dim] is None
        scale = scale[0] if spans_ranks else _join(scale, dim)
        above = self._tensor_scales[gemm]
        return QuantizedTensor(data.shape, self.dtype, spec, data, scale, rowwise_tensor_scale=above)


def _join(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """[ranks, R, K] -> [ranks R, K] or [R, ranks K]."""
    return parts.flatten(0, 1) if dim == 0 else parts.transpose(0, 1).flatten(1)


def _weight_spec(recipe: LinearRecipe, gemm: str) -> QuantSpec:
    spec = recipe.gemms[gemm].weight
    assert spec is not None
    return spec


def why_not_coded(recipe: LinearRecipe) -> str | None:
    """Reason why ranks cannot send the codes of a weight in place of its values; None if they can."""
    if primary_weight_spec(recipe) is not None:
        return None
    # dgrad may quantize the values of fprop's codes again, each rank by its own draws
    sent = {name: gemm for name in SIDES["weight"] if not _requantizes(gemm := recipe.gemms[name])}
    for name, gemm in sent.items():
        if gemm.weight is None:
            return f"{name} takes the weight in the compute dtype"
        if gemm.hadamard is not None:
            return f"{name} takes the weight after a Hadamard transform"
        if gemm.weight.random:
            return f"{name} rounds the weight by draws, which differ between ranks"
    for name, gemm in sent.items():
        if gemm.weight is not None and (gemm.weight.outer_block is not None or gemm.weight.scaling != "current"):
            return f"{name} takes the weight by delayed scales or scales of outer blocks"
    return None


def _requantizes(gemm: GemmSpec) -> bool:
    return gemm.weight is not None and gemm.weight.source == "fprop"
