"""Reopens a checkpoint for inference: its model, recipe and tokenizer, without training state. No megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe, recipe_from_dict
from megatron_lowprec.recipe.schema import Recipe
from megatron_lowprec.training.checkpoint import storage
from megatron_lowprec.training.checkpoint.resume import CONFIG, Saved, find_checkpoint, read
from megatron_lowprec.training.checkpoint.safe_load import Damaged
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_run

# Options of a run, not of its model: all are set anew or switched off.
_PLAIN: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "fp8_param_gather": False,
    "fp8_sequence_parallel_gather": False,
    "moe_fp8_dispatch": False,
    "recompute_granularity": None,
    "rampup_batch_size": None,
    "micro_batch_size": 1,
    "global_batch_size": None,
    "train_iters": 1,
    "train_samples": None,
    "lr": 0.0,
    "min_lr": 0.0,
    "load": None,
    "ckpt_step": None,
    "save": None,
    "pretrained_checkpoint": None,
    "rerun_in_bf16": [],
    "distributed_backend": None,
    "wandb_project": None,
    "mock_data": True,
    "sft": False,
    "data_path": None,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "data_phase_switch": None,
    "data_phase_switch_samples": None,
    "data_phase_path": None,
}


@dataclass(frozen=True)
class Reopened:
    """A checkpoint, its model's options for another layout, the recipe to run, and its embedding's rows."""

    saved: Saved
    config: Config
    recipe: Recipe
    padded_vocab_size: int


def find(path: str) -> Saved:
    """The checkpoint at a path: a run's folder, its checkpoints' folder (the newest one), or one iter_… folder.

    Raises:
        UserError: no checkpoint, a damaged one, or one with a disallowed pickle.
    """
    place = Path(path)
    if (place / CONFIG).is_file() and place.name.startswith("iter_"):
        try:
            return read(place)
        except Damaged as error:
            raise UserError(f"--load {place}: cannot be loaded: {error}; name another checkpoint") from None
    found, _ = find_checkpoint(Config(load=str(storage.checkpoints_of(place))))
    assert found is not None  # find_checkpoint raises if there is none, since this Config has no --save
    return found


def at_iteration(found: Saved, iteration: int | None) -> Saved:
    """Another checkpoint of the same run."""
    if iteration is None:
        return found
    return find(str(storage.at_iteration(str(found.folder.parent), iteration)))


def plain(config: Config) -> Config:
    """The model's options for one process, without data."""
    return replace(config, **_PLAIN)


def model_options(found: Saved) -> Config:
    """The options of a checkpoint's model, without those of its training and layout.

    Raises:
        UserError: options unknown to this version.
    """
    options = dict(found.content["options"])
    unknown = options.keys() - {field.name for field in fields(Config)}
    if unknown:
        raise UserError(
            f"--load {found.folder}: its config.yaml has options unknown here: {', '.join(sorted(unknown))}; "
            "use the version that wrote it"
        )
    return plain(Config(**options))


def reopen(found: Saved, world_size: int, gpus: bool, recipe: str | None = None, **layout: Any) -> Reopened:
    """The checkpoint's model for ``world_size`` processes; ``layout`` sets options such as parallel sizes.

    ``recipe`` is a name or a file; by default the checkpoint's own.
    """
    config = resolve_run(replace(model_options(found), **layout), world_size, gpus)
    chosen = load_recipe(recipe, []) if recipe is not None else recipe_from_dict(found.content["recipe"])
    return Reopened(found, config, chosen, found.content["padded_vocab_size"])
