"""Identity of a linear layer: keys of its random streams, amax histories, dimensions that its GEMMs contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.quantizer import Reduce
from megatron_lowprec.quantization.random_stream import Purpose, RandomStream, stream_key
from megatron_lowprec.recipe.coverage import site_path
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, QuantSpec
from megatron_lowprec.scaling import granularity_of

DIMS = {
    ("fprop", "input"): "TI",
    ("fprop", "weight"): "OI",
    ("dgrad", "grad_output"): "TO",
    ("dgrad", "weight"): "IO",
    ("wgrad", "grad_output"): "OT",
    ("wgrad", "input"): "IT",
}
"""Dimensions of each GEMM's operands, contracted one last: T tokens, I input features, O output features."""

SIDES = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
"""The GEMMs that contract a tensor's rows and its columns."""


@dataclass(frozen=True)
class LinearId:
    """Where a linear layer, or a rank's shard of one, stands: what its random streams are keyed by.

    ``spans`` says where the shard lies in the unsharded layer, for dimensions "I" and "O"; ``split`` names the
    dimension that ranks share, if any.
    """

    layer: int
    name: str
    expert: int = -1
    data_parallel_rank: int = 0
    spans: Mapping[str, ShardSlice] = field(default_factory=dict)
    split: str = ""

    @property
    def path(self) -> str:
        """``layers.3.mlp.linear_fc1``, and which expert's."""
        path = site_path(self.layer, self.name)
        return path if self.expert < 0 else f"{path} of expert {self.expert}"

    def rounding_streams(self, seed: int) -> dict[tuple[str, str], RandomStream]:
        """Draws of stochastic rounding, for each operand of each GEMM."""
        return {
            (gemm, operand): RandomStream(
                self._key(seed, "rounding", gemm, operand),
                row_span=self.spans.get(dims[0], ShardSlice()),
                column_span=self.spans.get(dims[1], ShardSlice()),
            )
            for (gemm, operand), dims in DIMS.items()
        }

    def sign_streams(self, seed: int) -> dict[str, RandomStream]:
        """Signs of the random Hadamard transform of each GEMM, the same for both operands."""
        return {gemm: RandomStream(self._key(seed, "sign", gemm)) for gemm in GEMM_OPERANDS}

    def shares_scale(self, gemm: str, operand: str, spec: QuantSpec) -> bool:
        """Whether a block of this operand reaches over the ranks that share ``split``."""
        dims, granularity = DIMS[gemm, operand], granularity_of(spec.granularity)
        sizes = (granularity.rows, granularity.columns)
        return any(size is None and dim == self.split for size, dim in zip(sizes, dims, strict=True))

    def _key(self, seed: int, purpose: Purpose, gemm: str, operand: str = "") -> tuple[int, int]:
        return stream_key(
            seed,
            purpose,
            layer=self.layer,
            linear=self.name,
            gemm=gemm,
            operand=operand,
            expert=self.expert,
            data_parallel_rank=self.data_parallel_rank,
        )


class LayerAmax(NamedTuple):
    """What a layer's scales follow beside a tensor's own entries: amax histories, and other ranks.

    Attributes:
        linear_id: the layer.
        histories: tensor -> its amax history and slot, for tensors with delayed scales.
        reduce: maximum over the ranks that share ``linear_id.split``; None without such ranks.
    """

    linear_id: LinearId
    histories: Mapping[str, tuple[AmaxHistory, int]]
    reduce: Reduce | None

    def reduction(self, gemm: str, tensor: str, spec: QuantSpec) -> Reduce | None:
        """Maximum over the ranks that share a current scale of a tensor in a GEMM; None without such ranks."""
        return self.reduce if self.linear_id.shares_scale(gemm, tensor, spec) else None
