"""Recipes of ``--log-quantization-also``, whose quantizers are applied to the operands of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite, TensorRanks, check_sizes
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.options.output_options import LoggingOptions


def counterfactual_recipes(config: LoggingOptions) -> list[Recipe]:
    """The recipes, in order; an option's value may name several, separated by commas. Files are read once."""
    return list(_recipes(tuple(config.log_quantization_also)))


@cache
def _recipes(values: tuple[str, ...]) -> tuple[Recipe, ...]:
    return tuple(load_recipe(name) for value in values for name in value.split(","))


def check_counterfactuals(
    config: LoggingOptions, sites: Sequence[LinearSite], num_layers: int, tensor_ranks: TensorRanks
) -> None:
    """Reject recipes that cannot be applied to a model's operands; arguments as of ``check_sizes``.

    Raises:
        UserError: a recipe twice, of delayed scaling, without quantization, or with blocks that do not divide a layer.
    """
    names: set[str] = set()
    for recipe in counterfactual_recipes(config):
        what = f"--log-quantization-also {recipe.name}"
        if recipe.name in names:
            raise UserError(f"{what} is given twice; leave one out")
        if recipe.delayed_operands():
            raise UserError(
                f"{what} has delayed scaling, and this run keeps no amax history for it; name a recipe of current or "
                "block scales"
            )
        if not recipe.quantized:
            raise UserError(f"{what} quantizes nothing; leave it out")
        try:
            check_sizes(recipe, sites, num_layers, tensor_ranks)
        except UserError as error:
            raise UserError(f"{what}: {error}; or leave it out there") from None
        names.add(recipe.name)
