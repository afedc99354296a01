"""Checkpoints of stock Megatron-LM: options from their ``args``, weights of both formats and both layer layouts.

Formats: ``torch_dist`` (a distributed checkpoint) and ``torch`` (``mp_rank_XX[_YYY]/model_optim_rng.pt``, one file per
tensor- and pipeline-parallel rank). Layouts: local layers, and TransformerEngine's, which include their norm.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.training.checkpoint import safe_load
from megatron_lowprec.training.checkpoint.storage import TRACKER, iteration_folder
from megatron_lowprec.training.config.arguments import KINDS
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.convert.names import Weights, canonical, check_values, is_weight
from megatron_lowprec.training.convert.stock_fields import RENAMED, check_fields, refused
from megatron_lowprec.training.convert.store import read_weights
from megatron_lowprec.training.models.architectures import model_options

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(_\d{3})?$")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_COLUMN = ("linear_qkv.", "linear_fc1.", "word_embeddings.", "output_layer.")  # sharded in dimension 0, as are biases
_ROW = ("linear_proj.weight", "linear_fc2.weight")  # sharded in dimension 1


@dataclass(frozen=True)
class Stock:
    """A checkpoint of stock Megatron-LM."""

    folder: Path
    args: Namespace
    weights: Weights


def read(path: str, trust: bool = False) -> Stock:
    """The newest checkpoint of a --save folder, or one of its iter_… or release folders.

    Args:
        trust: unpickle without restrictions, which can run code; only for a folder of known origin.

    Raises:
        UserError: no checkpoint, a damaged one, an unsupported kind of model, or a pickle that needs
            ``trust``.
    """
    try:
        return _read(_folder(Path(path)), trust)
    except safe_load.ForeignError as error:
        raise UserError(
            f"{error.place} asks for {error.name} when it is unpickled, which can run code: not loaded; add --trust "
            "if you know the folder's origin"
        ) from None


def _read(folder: Path, trust: bool) -> Stock:
    import megatron.core  # noqa: F401 - registers its checkpoints' classes with torch's restricted unpickler

    files = sorted(file for file in folder.glob("mp_rank_*/model_optim_rng.pt") if _RANK.match(file.parent.name))
    if files:
        args, weights = _read_files(files, trust)
    else:
        args = _common_state(folder, trust).get("args")
        weights = read_weights(folder, trust)
    if args is None:
        raise UserError(f"{folder}: holds no args of Megatron-LM, which say what model it is")
    if not getattr(args, "untie_embeddings_and_output_weights", False):
        weights.pop("output_layer.weight", None)  # the last stage's copy of the embedding
    # Norm weights are stored minus 1; the flag's name is the field's from release 0.16 on.
    if getattr(args, "apply_layernorm_1p", False) or getattr(args, "layernorm_zero_centered_gamma", False):
        weights = {n: t + 1 if _is_norm(n) else t for n, t in weights.items()}
    check_values(weights, str(folder))
    return Stock(folder, args, weights)


def options(args: Namespace) -> dict[str, Any]:
    """Options of a Config from Megatron-LM's args.

    Raises:
        UserError: an option that these layers do not support.
    """
    check_fields(args)
    biases = getattr(args, "add_bias_linear", True)
    plain_gelu = not (getattr(args, "swiglu", False) or getattr(args, "squared_relu", False))
    if plain_gelu and biases and not getattr(args, "bias_gelu_fusion", True):
        raise UserError(
            "the checkpoint's model has exact GELU (--no-bias-gelu-fusion); these layers have its tanh form"
        )
    # Same names in Megatron-LM's args and here; options of other architectures have meaningless defaults.
    given = {RENAMED.get(name, name): value for name, value in vars(args).items() if value is not None}
    given = {name: value for name, value in given.items() if name in Config.__dataclass_fields__}
    if "moe_layer_freq" in given:
        given["moe_layer_freq"] = str(given["moe_layer_freq"])  # a number, or the list of a pattern
    found = {name: given[name] for name in model_options(Config(**given)) if name in given}
    for name, value in found.items():
        choices = KINDS[name].choices
        if choices is not None and value not in choices:
            raise refused(name, value)
    if not found.get("group_query_attention", False):
        found.pop("num_query_groups", None)
    return found | {"disable_bias_linear": not biases, "bf16": bool(getattr(args, "bf16", False))}


def _folder(path: Path) -> Path:
    tracker = path / TRACKER
    if not tracker.exists():
        return path
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return path / "release"
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UserError(f"{path}: {TRACKER} holds {text!r}, not an iteration")
    return iteration_folder(str(path), int(text))


def _common_state(folder: Path, trust: bool) -> dict[str, Any]:
    if not (folder / ".metadata").exists():  # before 0.19 the state is a file, and was not found
        return _unpickled(folder / "common.pt", trust)
    try:
        return _dict(folder, safe_load.common_state(folder, safe_load.read_metadata(folder, trust), trust))
    except safe_load.Damaged as error:
        raise UserError(f"{folder}: {error}") from None


def _unpickled(file: Path, trust: bool) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return _dict(file, safe_load.unpickle(file, stream, trust))
    except FileNotFoundError:
        raise UserError(f"{file.parent}: no checkpoint of Megatron-LM there (no {file.name})") from None
    except (OSError, safe_load.Damaged) as error:
        raise UserError(f"{file.parent}: {error}") from None


def _dict(place: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{place}: holds {type_of(content)}, not a checkpoint")
    return content


def _is_norm(name: str) -> bool:
    return "layernorm" in name and name.endswith("weight")


# ---- one file per rank


def _read_files(files: Sequence[Path], trust: bool) -> tuple[Namespace | None, Weights]:
    """Args, and the merged weights of all ranks."""
    by_rank: dict[tuple[int, int], Path] = {}
    for file in files:
        match = _RANK.match(file.parent.name)
        assert match is not None
        if match[3] is not None:
            raise _experts_in_ranks(file)
        by_rank[int(match[2] or 0), int(match[1])] = file
    stages = max(stage for stage, _ in by_rank) + 1
    ranks = max(rank for _, rank in by_rank) + 1
    if len(by_rank) != stages * ranks:
        raise UserError(f"{files[0].parents[1]}: {len(by_rank)} files of {ranks} x {stages} ranks; some are missing")
    args: Namespace | None = None
    chunks: dict[int, list[Weights]] = {}
    for stage in range(stages):
        contents = [_unpickled(by_rank[stage, rank], trust) for rank in range(ranks)]
        args = args or contents[0].get("args")
        if getattr(args, "expert_model_parallel_size", None) not in (None, 1):  # without a pipeline no name shows it
            raise _experts_in_ranks(by_rank[stage, 0])
        gated = bool(getattr(args, "swiglu", False))
        models = [key for key in contents[0] if re.fullmatch(r"model\d*", key)]
        for place, key in enumerate(sorted(models, key=lambda key: int(key.removeprefix("model") or 0))):
            parts = [canonical({n: t for n, t in content[key].items() if is_weight(n)}) for content in contents]
            chunks.setdefault(place, []).append(_merged(parts, gated))
    # Interleaved: chunk 0 of every stage, then chunk 1 of every stage.
    return args, _numbered([chunk for place in sorted(chunks) for chunk in chunks[place]])


def _experts_in_ranks(file: Path) -> UserError:
    return UserError(f"{file.parent}: experts in files of ranks; convert it to torch_dist with Megatron-LM first")


def _merged(parts: Sequence[Weights], gated: bool) -> Weights:
    """Merge the weights of tensor-parallel ranks."""
    if len(parts) == 1:
        return parts[0]
    return {name: _joined(name, [part[name] for part in parts], gated) for name in parts[0]}


def _joined(name: str, shards: list[torch.Tensor], gated: bool) -> torch.Tensor:
    if "layernorm" in name:
        return shards[0]
    if gated and "linear_fc1." in name:  # each rank holds its gate shard, then its up-projection shard
        return torch.cat(
            [half for halves in zip(*(shard.chunk(2) for shard in shards), strict=True) for half in halves]
        )
    if any(part in name for part in _COLUMN):
        return torch.cat(shards)
    if name.endswith(_ROW):
        return torch.cat(shards, dim=1)
    return shards[0]


def _numbered(chunks: Sequence[Weights]) -> Weights:
    """Renumber the layers of all stages: each chunk counts its own from 0."""
    found, before = Weights(), 0
    for chunk in chunks:
        highest = -1
        for name, tensor in chunk.items():
            match = _LAYER.match(name)
            if match is not None:
                highest = max(highest, int(match[1]))
                name = f"decoder.layers.{before + int(match[1])}.{name[match.end() :]}"
            found.setdefault(name, tensor)
        before += highest + 1
    return found
