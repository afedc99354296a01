"""Identity of a linear layer: random-stream keys, amax histories, and the dimensions of its GEMMs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

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
"""Dimensions of each GEMM's operands, contracted dimension last: T tokens, I input features, O output features."""

SIDES = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
"""For each tensor, the GEMM that uses its rowwise data and the one that uses its columnwise data."""

_WRAPPERS = re.compile(r"(?:^|\.)(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_ADAPTER = re.compile(r"(?:^|\.)lora_\w+(?:\.|$)")


def added_by_peft(model: nn.Module) -> str:
    """What a ``PeftModel`` puts in front of a model's paths: a tuner wraps the model, prompt learning does not."""
    if not hasattr(model, "peft_config"):
        return ""
    tuner = any(each.__name__ == "BaseTuner" for each in type(model.base_model).__mro__)
    return "base_model.model." if tuner else "base_model."


def without_adapters(path: str, added: str = "") -> str:
    """The path that a module had before peft wrapped it; ``added`` is what a ``PeftModel`` put in front."""
    return _WRAPPERS.sub("", path.removeprefix(added))


def is_adapter(path: str) -> bool:
    """Whether a module is one of LoRA's two factors, in peft or torchtitan."""
    return _ADAPTER.search(path) is not None


def paths_of_modules(model: nn.Module) -> dict[int, list[str]]:
    """``id`` of each module -> all of its paths."""
    found = dict[int, list[str]]()
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(path)
    return found


def brief(paths: Sequence[str]) -> str:
    """Paths that differ in layer numbers as one with ``*``, and how many it stands for; others as they are."""
    alike = dict[str, list[str]]()
    for path in paths:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        alike.setdefault(path if set(name) <= {"*", "."} else name, []).append(path or "the model")
    return ", ".join(f"{name} ({len(found)})" if len(found) > 1 else found[0] for name, found in alike.items())


@dataclass(frozen=True)
class LinearId:
    """Identity of a linear layer or a rank's shard of one, from which its random-stream keys follow.

    ``spans`` locates the shard in the unsharded layer, for dimensions "I" and "O"; ``split`` names the dimension
    that is sharded over ranks, if any.
    """

    layer: int
    name: str
    expert: int = -1
    data_parallel_rank: int = 0
    spans: Mapping[str, ShardSlice] = field(default_factory=dict)
    split: str = ""

    @property
    def path(self) -> str:
        """``layers.3.mlp.linear_fc1``, with the expert's number if any."""
        return site_path(self.layer, self.name, self.expert)

    def rounding_streams(self, seed: int) -> dict[tuple[str, str], RandomStream]:
        """Stream of stochastic rounding for each operand of each GEMM."""
        return {
            (gemm, operand): RandomStream(
                self._key(seed, "rounding", gemm, operand),
                row_span=self.spans.get(dims[0], ShardSlice()),
                column_span=self.spans.get(dims[1], ShardSlice()),
            )
            for (gemm, operand), dims in DIMS.items()
        }

    def sign_streams(self, seed: int) -> dict[str, RandomStream]:
        """Stream of Hadamard signs for each GEMM, the same for both operands."""
        return {gemm: RandomStream(self._key(seed, "sign", gemm)) for gemm in GEMM_OPERANDS}

    def shares_scale(self, gemm: str, operand: str, spec: QuantSpec) -> bool:
        """Whether a block of this operand spans the ranks that share ``split``."""
        dims = DIMS[gemm, operand]
        granularity = granularity_of("tensor" if spec.has_tensor_amax else spec.granularity)
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
    """Amax histories of a layer, and the amax reduction over ranks that share a scale.

    Attributes:
        linear_id: the layer.
        histories: tensor -> its amax history and slot, for tensors with delayed scales.
        reduce: maximum over the ranks that share ``linear_id.split``; None without such ranks.
        records: whether casts record amaxes.
    """

    linear_id: LinearId
    histories: Mapping[str, tuple[AmaxHistory, int]]
    reduce: Reduce | None
    records: bool = True

    def reduction(self, gemm: str, tensor: str, spec: QuantSpec) -> Reduce | None:
        """Maximum over the ranks that share a current scale of a tensor in a GEMM; None without such ranks."""
        return self.reduce if self.linear_id.shares_scale(gemm, tensor, spec) else None
