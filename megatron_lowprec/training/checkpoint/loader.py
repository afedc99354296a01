"""Reopens a checkpoint for inference: its model, recipe and tokenizer, without training state. No megatron."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.layer_match import Progress
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.checkpoint import storage
from megatron_lowprec.training.checkpoint.resume import CONFIG, Saved, find_checkpoint, read
from megatron_lowprec.training.checkpoint.safe_load import Damaged
from megatron_lowprec.training.config.options import Config, options_in, options_with
from megatron_lowprec.training.config.phase_options import phase_iters
from megatron_lowprec.training.config.resolve import resolve_run
from megatron_lowprec.training.models.deepseek.options import LatentAttentionOptions
from megatron_lowprec.training.options.declaration import Part
from megatron_lowprec.training.options.model_options import ModelOptions, RopeOptions
from megatron_lowprec.training.options.moe_options import MoeOptions

# Options of the model, of its text and of its arithmetic. A run's other options are no part of it, however it began.
_KEPT = (
    *options_in(*Part, groups=(ModelOptions, RopeOptions, MoeOptions, LatentAttentionOptions)),
    *options_in(Part.TOKENIZER),
    *options_with(inference=True),
)


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
    kept = Config(**{name: getattr(config, name) for name in _KEPT})
    # Required of every run, or of other layouts than one process.
    return replace(kept, micro_batch_size=1, train_iters=1, lr=0.0, mock_data=True, moe_fp8_dispatch=False)


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

    ``recipe`` is a name or a file; by default the checkpoint's own. Its phase is that of the last completed step.

    Raises:
        UserError: options or a recipe that this version refuses.
    """
    config = resolve_run(replace(model_options(found), **layout), world_size, gpus)
    chosen = found.recipe if recipe is None else load_recipe(recipe, [])
    if chosen is None:
        raise UserError(f"checkpoint {found.folder}: its {CONFIG} has no recipe; use the version that wrote it")
    progress = Progress(max(found.progress["iteration"] - 1, 0), phase_iters(found.content["options"]))
    chosen = chosen.during(progress)
    return Reopened(found, config, chosen, found.content["padded_vocab_size"])
