"""What a run that resumes a checkpoint changes, against the run that wrote it. No megatron."""

from __future__ import annotations

from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import same_numerics
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.checkpoint.resume import Saved, differing, earlier_values
from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.options import NO_EFFECT, OPTIONS, Config, options_in, options_with
from megatron_lowprec.training.config.phase_options import phase_iters
from megatron_lowprec.training.models.sizes import has_experts
from megatron_lowprec.training.options.declaration import Part
from megatron_lowprec.training.options.recipe_options import RecipeOptions
from megatron_lowprec.training.schedule import Schedule

# Of them nothing is recorded among the options: recipes and the schedule have records of their own.
_ELSEWHERE = (Part.RECIPE, Part.SCHEDULE, Part.START, Part.EVALUATION, Part.TOKENIZER)
NOT_RECORDED = NO_EFFECT.union(options_in(*_ELSEWHERE))
_RECORDED = [name for name in OPTIONS if name not in NOT_RECORDED]
_NOTED = options_with(own_note=True)
# They determine the sample at each position.
_DATA = [name for name in options_in(Part.DATA) if name not in _NOTED]


def earlier_options(saved: Saved, config: Config, schedule: Schedule) -> list[dict[str, Any]]:
    """What determined the updates of a continued run before it changed, in order: ``until_iteration``, and the earlier
    values of options and of the schedule's fields.
    """
    now = schedule.to_dict()
    changed = earlier_values(_options_of(saved, config), config, _RECORDED)
    changed |= {name: value for name, value in saved.schedule.to_dict().items() if value != now[name]}
    if config.no_load_optim:  # of one start: the next one loads the new moments
        changed["no_load_optim"] = False
    last = [{"until_iteration": saved.progress["iteration"], **changed}] if changed else []
    return [*saved.content.get("earlier_options", []), *last]


def option_notes(saved: Saved, config: Config) -> list[str]:
    """Notes about options that a continued run has changed, if no other line of the log names them."""
    options = _options_of(saved, config)
    notes = []
    data = earlier_values(options, config, _DATA)
    if data:
        notes.append(
            f"data: {', '.join(map(flag, data))} differ from the checkpoint's run, "
            "so the samples from here on are not those it would have seen"
        )
    others = differing(options, config, [name for name in _RECORDED if name not in (*_DATA, *_NOTED)])
    if others:
        notes.append(f"options: {', '.join(others)}; config.yaml records the change")
    return notes


def _options_of(saved: Saved, config: RecipeOptions) -> dict[str, Any]:
    """The checkpoint's options; those that follow from others by default have their value, if they have one here."""
    options = dict(saved.content["options"])
    if config.recipe_phase_iters is not None and phase_iters(options) is not None:
        options["recipe_phase_iters"] = phase_iters(options)
    return options


def earlier_recipes(saved: Saved, recipe: Recipe) -> list[str]:
    """Names of the recipes that a continued run was under before this one, in order; empty if there is no other."""
    before = other_recipe(saved, recipe)
    return [*saved.content.get("earlier_recipes", []), *([] if before is None else [before.name])]


def recipe_note(saved: Saved, recipe: Recipe) -> list[str]:
    """A note if a run resumes under another recipe than it was saved with."""
    before = other_recipe(saved, recipe)
    if before is None:
        return []
    others = " with other fields" if before.name == recipe.name else ""
    return [f"recipe: {recipe.name}{others}, where the checkpoint was trained with {before.name}"]


def implementation_note(saved: Saved, config: Config) -> list[str]:
    """A note if a run resumes with other layers (--transformer-impl) than it was saved with.

    Megatron-core stores a dense model's weights, and so their optimizer state, under the same names for both.

    Raises:
        UserError: a model with experts, whose names differ.
    """
    before = saved.content["options"].get("transformer_impl", "local")
    if before == config.transformer_impl:
        return []
    if has_experts(config):
        raise UserError(
            f"checkpoint {saved.folder} was written with --transformer-impl {before}, under which a layer with experts "
            f"has other names than under {config.transformer_impl}; continue with {before}"
        )
    return [f"layers: {config.transformer_impl}, where the checkpoint was written with {before}"]


def other_recipe(saved: Saved, recipe: Recipe) -> Recipe | None:
    """The checkpoint's recipe if its numerics differ; None otherwise, and without one."""
    before = saved.recipe
    return None if before is None or same_numerics(before, recipe) else before
