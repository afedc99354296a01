"""Captured operands of a linear layer in a safetensors file: x, w, dy, and what is needed to quantize them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import atomic_replace, check_text, default_mode, parse_json
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.parsing import recipe_from_dict, recipe_to_dict
from megatron_lowprec.recipe.schema import LinearRecipe
from megatron_lowprec.recipe.yaml_text import read_yaml_text

FORMAT_VERSION = "1"
_TENSORS = ("x", "w", "dy")


@dataclass(frozen=True)
class RankOf:
    """A rank's index in a group of ranks, and the group's size."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Capture:
    """Unquantized operands of one linear layer in the first microbatch of an iteration, as one rank's GEMMs take them.

    T are the tokens of one data-parallel rank, under sequence parallelism gathered. I or O is this rank's shard if
    ``linear_id.split`` names it.

    Attributes:
        x: [T, I], in its own dtype, like the others.
        w: [O, I].
        dy: [T, O], the gradient of the loss that training differentiates.
        recipe: recipe of the layer: of bf16 if the run's recipe leaves the layer in bf16.
        linear_id: the layer; with ``seed`` it gives the keys of its random streams.
        iteration: number of the iteration in the log, from 1.
        seed: the run's seed.
        amax_in_effect: tensor -> amax from which its delayed scale follows; 0 before the first update.
        tensor_parallel, data_parallel: position of the rank.
    """

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    recipe: LinearRecipe
    linear_id: LinearId
    iteration: int
    seed: int
    amax_in_effect: Mapping[str, float]
    tensor_parallel: RankOf = RankOf()
    data_parallel: RankOf = RankOf()

    @property
    def file_name(self) -> str:
        """``layers.3.mlp.linear_fc1.safetensors``, with the ranks that hold a part of the weight or of the tokens."""
        parts = [self.linear_id.path.replace(" of expert ", ".expert")]
        for name, place in (("tp", self.tensor_parallel), ("dp", self.data_parallel)):
            parts += [f"{name}{place.rank}-of-{place.size}"] if place.size > 1 else []
        return ".".join([*parts, "safetensors"])

    @property
    def rng_step(self) -> RngStep:
        """Step and microbatch of the captured operands' random draws."""
        return RngStep(self.iteration - 1, 0)

    def linear_gemms(self) -> LinearGemms:
        """The layer's GEMMs at the captured iteration, on the tensors' device: same draws, signs and delayed scales.

        A current scale that spans tensor-parallel ranks is of this rank's shard.
        """
        gemms = LinearGemms(self.recipe, self.linear_id, self.seed, AmaxHistory)
        for tensor, (history, slot) in gemms.histories.items():
            history.to(self.x.device)
            history.in_effect[slot] = self.amax_in_effect[tensor]
        return gemms


def write_capture(folder: Path, capture: Capture) -> Path:
    """Write ``file_name`` into an existing folder, atomically; returns its path.

    Raises:
        OSError: the file cannot be written.
    """
    linear = capture.linear_id
    shard = {
        "layer": linear.layer,
        "name": linear.name,
        "expert": linear.expert,
        "rng_data_parallel_rank": linear.data_parallel_rank,
        "split": linear.split,
        "spans": {dimension: list(span) for dimension, span in linear.spans.items()},
        "tensor_parallel": asdict(capture.tensor_parallel),
        "data_parallel": asdict(capture.data_parallel),
    }
    metadata = {
        "format_version": FORMAT_VERSION,
        "linear": linear.path,
        "iteration": str(capture.iteration),
        "seed": str(capture.seed),
        "recipe": yaml.safe_dump(recipe_to_dict(capture.recipe), sort_keys=False),
        "amax_in_effect": json.dumps(dict(capture.amax_in_effect)),
        "shard": json.dumps(shard),
    }
    path = folder / capture.file_name
    tensors = {name: getattr(capture, name).contiguous() for name in _TENSORS}
    with atomic_replace(path) as partial:
        try:
            save_file(tensors, partial, metadata)
        except SafetensorError as error:  # also for a full disk
            raise OSError(str(error)) from None
        default_mode(partial)
    return path


def read_capture(path: Path, device: torch.device | str = "cpu") -> Capture:
    """The capture in a file of ``write_capture``.

    Raises:
        UserError: no such file, or one of another content or version.
    """
    try:
        with safe_open(str(path), "pt", device=str(device)) as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}; name a file that --capture-step wrote") from None
    version = metadata.get("format_version")
    if version != FORMAT_VERSION or not tensors.keys() >= set(_TENSORS):
        raise UserError(
            f"{path}: expected operands captured by --capture-step, format version {FORMAT_VERSION}; found version "
            f"{version} and tensors {', '.join(sorted(tensors)) or 'none'}"
        )
    try:
        check_text(metadata)
        shard, amaxes = parse_json(metadata["shard"]), parse_json(metadata["amax_in_effect"])
        linear_id = LinearId(
            shard["layer"],
            shard["name"],
            shard["expert"],
            shard["rng_data_parallel_rank"],
            {dimension: ShardSlice(*span) for dimension, span in shard["spans"].items()},
            shard["split"],
        )
        return Capture(
            **{name: tensors[name] for name in _TENSORS},
            recipe=recipe_from_dict(read_yaml_text(metadata["recipe"], "its recipe")),
            linear_id=linear_id,
            iteration=int(metadata["iteration"]),
            seed=int(metadata["seed"]),
            amax_in_effect={tensor: float(amax) for tensor, amax in amaxes.items()},
            tensor_parallel=RankOf(**shard["tensor_parallel"]),
            data_parallel=RankOf(**shard["data_parallel"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged: {error}; capture it again") from None
