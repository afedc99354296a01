"""A shard of a weight that FSDP2 gathers as codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.lowprec_linear import LowPrecLayer


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
