"""Captured operands of a run: which layers ``--capture-layers`` names, how many bytes, and their files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite, site_path
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.paths import RunPaths
from megatron_lowprec.training.config.resolve import data_parallel_size
from megatron_lowprec.training.memory.plan import GIB
from megatron_lowprec.training.models.common.interface import Sharding
from megatron_lowprec.training.models.sizes import linear_sites, sharding

if TYPE_CHECKING:
    from megatron_lowprec.linear.capture_file import Capture


def check_capture(config: Config) -> None:
    """Reject a glob of --capture-layers that matches no linear layer.

    Raises:
        UserError: with the names of all layers.
    """
    layers = _layers(config)
    names = [name for site, shards in layers.items() for name in _paths(site, shards)]
    for glob in config.capture_layers:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UserError(f"--capture-layers {glob} matches no linear layer; this model has {_summary(layers)}")


def capture_line(config: Config, paths: RunPaths, world_size: int, completed: int) -> str:
    """Header line: number of layers, bytes of all ranks' files, and their folder, after ``completed`` iterations."""
    layers, globs = _layers(config), config.capture_layers
    matched = {site: count for site, shards in layers.items() if (count := _matched(globs, _paths(site, shards)))}
    size = sum(count * _bytes(config, site, layers[site], world_size) for site, count in matched.items())
    about = "about " if any(layers[site].experts for site in matched) else ""
    asked = sorted(set(config.capture_step))
    behind = " (behind: written before, or never)"
    steps = ", ".join(f"{step}{behind if step <= completed else ''}" for step in asked)
    number = sum(matched.values())
    return (
        f"operands of {number} linear layer{'s' if number > 1 else ''} in iteration {steps}: {about}{size / GIB:.3f} "
        f"GiB each time, in {paths.captures}"
    )


def write_captures(folder: Path, captures: Iterable[Capture]) -> None:
    """Write this rank's captures, one file each, into ``folder``, which is created.

    Raises:
        UserError: a file cannot be written.
    """
    from megatron_lowprec.linear.capture_file import write_capture

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for capture in captures:
            write_capture(folder, capture)
    except OSError as error:
        raise UserError(
            f"{folder}: captured operands could not be written: {error.strerror or error}; make room, or name fewer "
            "layers by --capture-layers"
        ) from None


def _layers(config: Config) -> dict[LinearSite, Sharding]:
    return {site: sharding(config, site) for site in linear_sites(config)}


def _paths(site: LinearSite, shards: Sharding) -> list[str]:
    """``LinearId.path`` of a layer, or of each of its experts."""
    experts: Sequence[int] = range(shards.copies) if shards.experts else (-1,)
    return [site_path(site.layer_number, site.name, expert) for expert in experts]


def _matched(globs: Sequence[str], paths: Sequence[str]) -> int:
    return sum(any(fnmatchcase(path, glob) for glob in globs) for path in paths)


def _summary(layers: Mapping[LinearSite, Sharding]) -> str:
    """All names, with one pattern for the layers that share it."""
    found: dict[str, list[int]] = {}
    for site, shards in layers.items():
        experts = f" of expert E (0 to {shards.copies - 1})" if shards.experts else ""
        found.setdefault(f"{site.name}{experts}", []).append(site.layer_number)
    return ", ".join(f"layers.N.{name} (N from {min(at)} to {max(at)})" for name, at in found.items())


def _bytes(config: Config, site: LinearSite, shards: Sharding, world_size: int) -> float:
    """Bytes of x, w and dy of one layer or expert over all ranks; for an expert under a balanced load."""
    data, tensor = data_parallel_size(config, world_size), shards.tensor_ranks
    tokens: float = data * config.steps.micro_batch_size * config.shape.seq_length
    replicas = data
    if shards.experts:
        tokens = tokens * shards.copies_per_token / shards.copies
        ranks = data * config.tensor_model_parallel_size
        replicas = ranks // (config.expert_model_parallel_size * tensor)
    # the dimension that is not split is on every tensor-parallel rank
    copies = {"column": (tensor, 1), "row": (1, tensor)}[site.split]
    entries = tokens * (site.in_features * copies[0] + site.out_features * copies[1])
    entries += replicas * site.in_features * site.out_features
    return entries * (2 if config.bf16 else 4)
