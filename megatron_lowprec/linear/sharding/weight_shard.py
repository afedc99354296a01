"""Shards of weights that FSDP2 gathers as codes: which codes, from which amaxes, and their bytes on the wire."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.dispatch import multi_tensor_cast_, partial_amax, partial_cast_
from megatron_lowprec.kernels.partial_cast.reference import Shard
from megatron_lowprec.kernels.quantize.reference import block_amax
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.linear.lowprec_linear import LowPrecConv1D, LowPrecLayer
from megatron_lowprec.linear.sharding.gathered_weight import GatheredWeight
from megatron_lowprec.linear.sharding.tensor_parallel import is_dtensor
from megatron_lowprec.quantization.primary_weight import Fp8Weight, weight_encode_scale
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes
from megatron_lowprec.quantization.token_rows import stored_codes
from megatron_lowprec.recipe.coverage import LinearSite, indivisible, primary_weight_spec
from megatron_lowprec.recipe.schema import GemmSpec, LinearRecipe, QuantSpec
from megatron_lowprec.scaling import granularity_of

_CODES = {
    False: CastRequest(True, False, update_amax=False, codes=True),
    True: CastRequest(False, True, update_amax=False, codes=True),
}
_NO_DRAWS = RngStep(0, 0)


class WeightShard(ABC):
    """A rank's rows of a weight, and the scales of the whole weight for the passes in progress.

    Args:
        path: of the layer.
        layer: its weight is a DTensor of ``fully_shard``, and of ``parallelize_module`` before it.
        dtype: in which the weight would be gathered.

    Attributes:
        shard: fp32 or bf16 [rows, I], the local tensor.
        start: the first row, of those of this tensor-parallel rank.
        shape: (O, I) of the rows that are gathered.
        rows: of each shard, padding included.
        group: the ranks that gather.
        split: the dimension that tensor-parallel ranks split, "O" or "I", or "".
        scaled_version: the version of the weight of which the scales are.
    """

    def __init__(self, path: str, layer: LowPrecLayer, dtype: torch.dtype) -> None:
        sharded: Any = layer.weight
        mesh, placements = sharded.device_mesh, sharded.placements
        dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        if not dims or len(dims) > 2 or getattr(placements[dims[0]], "dim", None) != 0:
            raise UserError(f"{path}.weight is placed as {placements}; an FP8 all-gather needs one Shard(0)")
        self.path, self.layer, self.dtype = path, layer, dtype
        self.group: dist.ProcessGroup = mesh.get_group(dims[0])
        self.shard: torch.Tensor = sharded._local_tensor
        self._groups: tuple[dist.ProcessGroup, ...] = tuple(mesh.get_group(dim) for dim in dims)
        self.split = "OI"[placements[dims[1]].dim] if len(dims) == 2 else ""
        self.shape = torch.Size(
            size // (mesh.size(dims[1]) if letter == self.split else 1)
            for letter, size in zip("OI", sharded.shape, strict=True)
        )
        self.rows = -(-self.shape[0] // self.group.size())  # FSDP2 pads the last shards
        self.start = self.rows * self.group.rank()
        self._sharded = sharded
        if self.shard.device.type == "cpu" and self.shard.is_pinned():
            raise UserError(f"{path}.weight is offloaded to the CPU, which an FP8 all-gather does not support")
        self.scaled_version = -1

    @property
    def version(self) -> int:
        """Changes with the values: an optimizer's write is counted only by the DTensor."""
        return int(self._sharded._version) + self.shard._version

    def values(self) -> torch.Tensor:
        """The shard as the weight would be gathered, contiguous."""
        return self.shard.to(self.dtype).contiguous()

    def begin_pass(self, training: bool) -> None:  # noqa: B027
        """Before a forward pass of the model."""

    @abstractmethod
    def amaxes(self, norm: torch.Tensor) -> list[tuple[torch.Tensor, tuple[dist.ProcessGroup, ...]]]:
        """Amaxes of this rank's shard, fp32 [n], and the groups of ranks that share their scales.

        Args:
            norm: fp32 [1], the amax of ``values``.
        """

    @abstractmethod
    def set_amaxes(self, own: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
        """Take the amaxes of the whole weight."""

    @abstractmethod
    def pack(self, backward: bool) -> torch.Tensor:
        """uint8, what this rank sends; the same size on all ranks and in each pass."""

    @abstractmethod
    def receive(self, gathered: torch.Tensor, backward: bool, out: Any) -> Any:
        """The weight of what all ranks sent; written into ``out`` if given."""


class PrimaryShard(WeightShard):
    """FP8 codes that fprop and dgrad share, by fp32 scales of the tensor or of square blocks.

    Scales follow from the reduced amaxes, so blocks may cross shards and no scale is sent.
    """

    def __init__(self, path: str, layer: LowPrecLayer, dtype: torch.dtype, spec: QuantSpec) -> None:
        super().__init__(path, layer, dtype)
        self.spec, self._delayed = spec, False
        self.encode_scale = self.decode_scale = self.amax = torch.empty(0)

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
        """As ``WeightShard``: the scales."""
        (self.amax,), (used,) = own, whole  # the amaxes of delayed scaling meet those of other ranks after the step
        if self._delayed:
            history, slot = self.layer.linear_gemms.histories["weight"]
            used = history.in_effect[slot : slot + 1].to(used.device)
        if self.spec.block is not None:
            rows, columns = Shard(used, 0, (self.shape[0], self.shape[1])).blocks(self.spec.block)
            self.amax = used = used.view(rows, columns)
        self.encode_scale = weight_encode_scale(used, self.spec)
        self.decode_scale = torch.ones_like(self.encode_scale) / self.encode_scale

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


class CodedShard(WeightShard):
    """Codes and scales as a backend's cast gives them, for fprop and dgrad.

    Square blocks serve both, and so do codes of fprop whose values dgrad quantizes again. Else both directions are
    sent, or, where that is no less than the weight itself, the direction of the pass: then FSDP2 must gather before
    each.

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
        self._shared = by_row == by_column and by_row.block is not None and by_row.block[0] == by_row.block[1]
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
            cast, _ = backends.resolved.gemms[gemm].quantize("weight", values, _NO_DRAWS, _CODES[columnwise])
            data, scale = cast.columnwise() if columnwise else cast.rowwise()
            self._tensor_scales[gemm] = cast.columnwise_tensor_scale if columnwise else cast.rowwise_tensor_scale
            assert scale is not None
            codes = QuantizedTensor(data.shape, self.dtype, self._specs[gemm], data, scale)
            packed = codes.packed_codes if codes.format.bits == 4 else data.contiguous().view(torch.uint8)
            parts += [packed.flatten(), scale.contiguous().view(torch.uint8).flatten()]
        sent = torch.cat(parts)
        return pad(sent, (0, self.bytes - sent.numel()))

    def receive(self, gathered: torch.Tensor, backward: bool, out: Any) -> Any:
        """As ``WeightShard``; codes are unpacked for each GEMM, since FSDP2 frees only what it gathered."""
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
        width = columns // 2 if FORMATS[spec.format].bits == 4 else columns
        return rows * width + math.prod(scales) * (4 if spec.scale_format == "fp32" else 1)

    def _joined(self, gemm: str) -> QuantizedTensor:
        """Rowwise codes of a GEMM's operand, joined of the shards'."""
        (rows, columns), scales = self._shapes(gemm)
        spec, dim = self._specs[gemm], 0 if gemm == "fprop" else 1
        first = sum(self._bytes(other) for other in self._sent[: self._sent.index(gemm)])
        ranks = self._gathered.view(self.group.size(), self.bytes)[:, first : first + self._bytes(gemm)]
        width = columns // 2 if FORMATS[spec.format].bits == 4 else columns
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


def weight_shard(path: str, layer: LowPrecLayer, param_dtype: torch.dtype | None) -> WeightShard | str:
    """The shard of a layer's weight, or the reason why it is gathered in the compute dtype.

    Raises:
        UserError: the weight is not sharded by ``fully_shard`` along its rows, or is offloaded to the CPU.
    """
    recipe = layer.linear_gemms.recipe
    if not recipe.quantized:
        return "not quantized"
    if isinstance(layer, LowPrecConv1D):
        return "stored transposed"
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
