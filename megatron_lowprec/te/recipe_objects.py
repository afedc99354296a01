"""TransformerEngine's recipe objects, for ``te.autocast``.

Every field that decides numerics is set, so that no environment variable does: TransformerEngine's classes read
``NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES``, ``NVTE_FP8_BLOCK_SCALING_FP32_SCALES``, ``NVTE_BACKWARD_OVERRIDE`` and
``NVTE_NVFP4_*`` for their defaults when they are imported.
"""

from __future__ import annotations

from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import RecipeLike, as_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import QuantSpec
from megatron_lowprec.te.factory import QuantizerFactory, block_dim
from megatron_lowprec.te.imports import import_te
from megatron_lowprec.te.translation import (
    KINDS,
    Kind,
    builtin_kind,
    by_place_or_time,
    directions,
    fp8_format,
    quantizes_backward,
    why_not,
)

_PARAMETERS = {"input": "fp8_quant_fwd_inp", "weight": "fp8_quant_fwd_weight", "grad_output": "fp8_quant_bwd_grad"}
_BLOCK_DIMS = {"input": "x_block_scaling_dim", "weight": "w_block_scaling_dim", "grad_output": "grad_block_scaling_dim"}


def te_recipe(recipe: RecipeLike) -> Any:
    """TransformerEngine's recipe with the numerics of ``recipe``: ``te.autocast(recipe=te_recipe("fp8_current"))``.

    A class of its own where one computes the recipe (``DelayedScaling``, ``Float8CurrentScaling``,
    ``Float8BlockScaling``, ``MXFP8BlockScaling``, ``NVFP4BlockScaling``), otherwise a ``CustomRecipe`` with a
    ``QuantizerFactory``.

    Args:
        recipe: a recipe, a registered name or a YAML file.

    Raises:
        UserError: TransformerEngine does not compute the recipe, with the reason; it cannot be imported.
    """
    recipe = as_recipe(recipe)
    reason = why_not(recipe)
    if reason is not None:
        raise UserError(f"recipe {recipe.name} has no TransformerEngine recipe: {reason}")
    if not recipe.quantized:
        raise UserError(f"recipe {recipe.name} quantizes nothing: run without te.autocast, or with enabled=False")
    if (what := by_place_or_time(recipe)) is not None:
        raise UserError(
            f"recipe {recipe.name}: {what}, but a TransformerEngine recipe applies to all layers in its te.autocast, "
            "at all times; take the recipe without them and call each layer under the te.autocast that it needs"
        )
    classes = import_te("common.recipe")
    common = {"fp8_format": classes.Format[fp8_format(recipe).upper()], "backward_override": None}
    kind = builtin_kind(recipe)
    if kind is None:
        return classes.CustomRecipe(qfactory=QuantizerFactory(recipe), **common)
    if not quantizes_backward(recipe):
        common["backward_override"] = "high_precision"
    return _with_parameters(getattr(classes, KINDS[kind].recipe_class), kind, recipe, common)


def _with_parameters(recipe_class: Any, kind: Kind, recipe: Recipe, common: dict[str, Any]) -> Any:
    quants = {name: pair.rowwise for name, pair in directions(recipe).items() if pair.rowwise is not None}
    power_of_two = all(quant.power_of_two_scale for quant in quants.values())
    if kind == "delayed":
        quant = quants["input"]
        history = {"amax_history_len": quant.history, "amax_compute_algo": quant.history_rule, "margin": quant.margin}
        return recipe_class(**history, **common)
    if kind == "mxfp8":
        return recipe_class(enable_2d_quantization=quants["weight"].granularity == "32x32", **common)
    if kind == "nvfp4":
        gradient = quants.get("grad_output")
        return recipe_class(
            disable_rht=recipe.wgrad.hadamard is None,
            disable_stochastic_rounding=gradient is None or gradient.rounding != "stochastic",
            disable_2d_quantization=quants["weight"].granularity != "16x16",
            row_scaled_activation=False,
            nvfp4_4over6="none",
            **common,
        )
    if kind == "tensorwise":
        accumulation = import_te("common.recipe").MMParams
        products = {
            f"fp8_gemm_{name}": accumulation(use_split_accumulator=not gemm.fast_accumulation)
            for name, gemm in recipe.gemms.items()
        }
        found = recipe_class(use_power_2_scales=power_of_two, **products, **common)
    else:
        dims = {_BLOCK_DIMS[name]: block_dim(quant) for name, quant in quants.items()}
        found = recipe_class(use_f32_scales=not power_of_two, **dims, **common)
    return _with_scales(found, quants)


def _with_scales(found: Any, quants: dict[str, QuantSpec]) -> Any:
    """Set the scales of each tensor: attributes of the class, computed from the environment, and no arguments of it."""
    parameters = import_te("common.recipe").QParams
    for name, quant in quants.items():
        scales = parameters(power_2_scale=quant.power_of_two_scale, amax_epsilon=quant.amax_floor)
        setattr(found, _PARAMETERS[name], scales)
    return found
