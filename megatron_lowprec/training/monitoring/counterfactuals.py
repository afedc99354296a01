"""Recipes of ``--log-quantization-also``, whose quantizers are applied to the operands of a run."""

from __future__ import annotations

from functools import cache

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import check_sizes
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.sizes import linear_sites, tensor_ranks
from megatron_lowprec.training.options.output_options import LoggingOptions


def counterfactual_recipes(config: LoggingOptions) -> list[Recipe]:
    """The recipes, in order; an option's value may name several, separated by commas. Files are read once."""
    return list(_recipes(tuple(config.log_quantization_also)))


@cache
def _recipes(values: tuple[str, ...]) -> tuple[Recipe, ...]:
    return tuple(load_recipe(name) for value in values for name in value.split(","))


def check_counterfactuals(config: Config) -> None:
    """Reject recipes that cannot be applied to this model's operands.

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
        check_sizes(recipe, linear_sites(config), config.shape.num_layers, tensor_ranks(config))
        names.add(recipe.name)
