"""Quantizer factories for TransformerEngine's CustomRecipe, and for Megatron-LM's ``--fp8-quantizer-factory``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import RecipeLike, as_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import QuantSpec
from megatron_lowprec.te.imports import import_te
from megatron_lowprec.te.te_config import find_te_config
from megatron_lowprec.te.translation import (
    accumulation_fault,
    builtin_kind,
    by_place_or_time,
    directions,
    kind_of,
    kinds_of,
    why_not,
)

_LINEARS = ("linear", "grouped_linear")


@dataclass(frozen=True, repr=False)
class QuantizerFactory:
    """Role -> quantizer of a recipe: the ``qfactory`` of a ``CustomRecipe``.

    Factories of equal recipes are equal. Megatron-core builds a CustomRecipe in every forward pass of a layer, and
    TransformerEngine keeps the layer's quantizers only while these are equal.

    Attributes:
        recipe: one that TransformerEngine has quantizers for (``translation.why_not``).
    """

    recipe: Recipe

    def __call__(self, role: Any) -> Any:
        """Quantizer of a tensor, or a request of one with an amax history.

        Outputs, input gradients and attention are not quantized: an ``IdentityQuantizer``.

        Args:
            role: TransformerEngine's ``QuantizerRole``; None for a tensor whose consumer is unknown.

        Raises:
            UserError: the module has no roles, so its tensors cannot be told apart; TransformerEngine is missing.
        """
        if role is not None and not (role.module_type or role.tensor_type or role.name):
            raise UserError(
                f"recipe {self.recipe.name}: a TransformerEngine module requests quantizers without naming its "
                "tensors; use te.Linear, te.LayerNormLinear, te.LayerNormMLP or te.GroupedLinear"
            )
        tensors = directions(self.recipe)
        if role is None or role.module_type not in _LINEARS or role.tensor_type not in tensors:
            return quantizer_of(None)
        rowwise, columnwise = tensors[role.tensor_type]
        if rowwise == columnwise:
            return quantizer_of(rowwise)
        hybrid = import_te("pytorch.tensor.hybrid_tensor").HybridQuantizer
        # dgrad and wgrad quantize the original tensor, as in this project
        return hybrid(
            rowwise_quantizer=quantizer_of(rowwise),
            columnwise_quantizer=quantizer_of(columnwise),
            columnwise_source="original",
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.recipe.name})"  # part of keys that are computed in every forward pass


def quantizer_factory(recipe: RecipeLike) -> QuantizerFactory:
    """The factory of a recipe for Megatron-LM's ``--fp8-quantizer-factory``.

    Raises:
        UserError: TransformerEngine's quantizers or Megatron-core's ``--fp8-recipe custom`` do not express the recipe.
    """
    recipe = as_recipe(recipe)
    reason = why_not(recipe)
    if reason is not None:
        raise UserError(f"recipe {recipe.name} has no TransformerEngine quantizers: {reason}")
    if not recipe.quantized:
        raise UserError(f"recipe {recipe.name} quantizes nothing: leave out --fp8-format and its flags")
    reason = why_no_factory(recipe)
    if reason is not None:
        raise UserError(f"recipe {recipe.name} does not run by --fp8-recipe custom: {reason}; {_instead(recipe)}")
    override = import_te("common.recipe").CustomRecipe.backward_override
    if override is not None:
        raise UserError(
            f"NVTE_BACKWARD_OVERRIDE={override} makes every CustomRecipe ignore the backward pass of recipe "
            f"{recipe.name}; unset it"
        )
    return QuantizerFactory(recipe)


def why_no_factory(recipe: Recipe) -> str | None:
    """Reason why the recipe does not run by Megatron-LM's ``--fp8-recipe custom``; None if it does.

    Args:
        recipe: one that TransformerEngine has quantizers for.
    """
    if "nvfp4" in kinds_of(recipe) and by_place_or_time(recipe) is None:
        return "NVFP4 is Megatron-LM's own recipe there"
    if "delayed" in kinds_of(recipe):
        return "amax windows would advance once a layer, since Megatron-core enters an FP8 context for each layer"
    if (what := by_place_or_time(recipe)) is not None:
        return f"{what}, which a quantizer factory does not see"
    return accumulation_fault(recipe)


def own_flags(recipe: Recipe) -> str | None:
    """Megatron-LM's own flags for the recipe, after the environment variables that must be set; None without such.

    Args:
        recipe: one that TransformerEngine has quantizers for.
    """
    if builtin_kind(recipe) == "nvfp4" and by_place_or_time(recipe) is None:
        return "--fp4-format e2m1 --fp4-recipe nvfp4"
    found = find_te_config(recipe)
    return None if found is None else found.flags()


def _instead(recipe: Recipe) -> str:
    flags = own_flags(recipe)
    return "choose a recipe without that" if flags is None else f"run it by Megatron-LM's own flags: {flags}"


def quantizer_of(quant: QuantSpec | None) -> Any:
    """Quantizer of an operand, a request for one with an amax history, or an ``IdentityQuantizer`` for None."""
    if quant is None:
        return import_te("pytorch.tensor.identity_tensor").IdentityQuantizer()
    kind = kind_of(quant)
    if kind == "delayed":
        formats = import_te("common.recipe").Format
        return import_te("pytorch.quantization").DelayedScalingRequest(
            # hybrid is E5M2 in the backward pass; E5M2 of the forward pass is refused
            fp8_format=formats.HYBRID if quant.format == "e5m2" else formats.E4M3,
            margin=quant.margin,
            amax_history_len=quant.history,
            amax_compute_algo=quant.history_rule,
            reduce_amax=True,
        )
    dtypes = import_te("pytorch.constants").DType
    dtype = dtypes.kFloat8E5M2 if quant.format == "e5m2" else dtypes.kFloat8E4M3
    if kind == "mxfp8":
        quantizer = import_te("pytorch.tensor.mxfp8_tensor").MXFP8Quantizer
        return quantizer(dtype, with_2d_quantization=quant.granularity == "32x32")
    scales: dict[str, Any] = {"force_pow_2_scales": quant.power_of_two_scale, "amax_epsilon": quant.amax_floor}
    if kind == "tensorwise":
        return import_te("pytorch.tensor.float8_tensor").Float8CurrentScalingQuantizer(dtype, device="cuda", **scales)
    return import_te("pytorch.tensor.float8_blockwise_tensor").Float8BlockQuantizer(
        dtype, rowwise=True, columnwise=True, block_scaling_dim=block_dim(quant), **scales
    )


def block_dim(quant: QuantSpec) -> int:
    """TransformerEngine's ``block_scaling_dim``: 1 for blocks of 1x128, 2 for 128x128."""
    return 2 if quant.granularity == "128x128" else 1
