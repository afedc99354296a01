"""The iterations that a recipe's phases count their fractions of; a run that resumes keeps the checkpoint's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.options.recipe_options import RecipeOptions


def check_phase_iters(config: RecipeOptions, recipe: Recipe) -> None:
    """Reject --recipe-phase-iters for a recipe in which nothing begins at a fraction of the run."""
    if config.recipe_phase_iters is not None and not _has_fractions(recipe):
        raise UserError(
            f"--recipe-phase-iters {config.recipe_phase_iters} does nothing: no phase of recipe {recipe.name} begins "
            "at from_fraction; leave it out"
        )


def phase_iters(options: Mapping[str, Any]) -> int | None:
    """Iterations that ``from_fraction`` is a fraction of, from a run's options; None if unknown."""
    return options.get("recipe_phase_iters") or options.get("train_iters")


def continued_phases(
    config: Config, recipe: Recipe, saved: Mapping[str, Any], before: Recipe | None, given: Collection[str]
) -> tuple[Config, list[str]]:
    """The options of a run that resumes a checkpoint, with the checkpoint's --recipe-phase-iters; a note if so.

    In a run of another length the same fraction is another iteration: a phase that has begun would end again. A recipe
    whose phases begin elsewhere than the checkpoint's counts the new run's iterations; so does --recipe-phase-iters.

    Args:
        config: with its final ``train_iters``.
        saved: the checkpoint's options.
        before: the checkpoint's recipe.
        given: names of this run's options that were given.
    """
    now, then = phase_iters(vars(config)), phase_iters(saved)
    same = before is not None and _beginnings(before) == _beginnings(recipe)
    if "recipe_phase_iters" in given or not same or None in (now, then):
        return config, []
    kept = replace(config, recipe_phase_iters=saved.get("recipe_phase_iters"))
    if [phase.begins(then) for phase in recipe.phases] == [phase.begins(now) for phase in recipe.phases]:
        return kept, []
    note = (
        f"phases of the recipe: they begin at fractions of {then:,} iterations, as in the checkpoint's run, not of "
        f"{now:,} (--recipe-phase-iters moves them)"
    )
    return replace(kept, recipe_phase_iters=then), [note]


def with_steps(recipe: Recipe, config: RecipeOptions) -> Recipe:
    """The recipe with the steps of --recipe-phase-iters in place of fractions; as it is without that option."""
    total = config.recipe_phase_iters
    if total is None or not _has_fractions(recipe):
        return recipe
    phases = tuple(replace(phase, from_step=phase.begins(total), from_fraction=None) for phase in recipe.phases)
    return replace(recipe, phases=phases)


def _has_fractions(recipe: Recipe) -> bool:
    return any(phase.from_fraction is not None for phase in recipe.phases)


def _beginnings(recipe: Recipe) -> list[tuple[int | None, float | None]]:
    return [(phase.from_step, phase.from_fraction) for phase in recipe.phases]
