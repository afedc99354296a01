"""Options that exclude a recipe's storage of gradients or of activations."""

from __future__ import annotations

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.options.training_options import ParallelOptions


def check_stored_gradients(config: ParallelOptions, recipe: Recipe) -> None:
    """Reject options that need Megatron-core's gradient buffers, for a recipe that stores gradients in its format.

    Raises:
        UserError: names the option.
    """
    if config.grad_reduce_in_bf16:
        raise UserError(
            f"{flag('grad_reduce_in_bf16')} was given, but recipe {recipe.name} stores gradients in "
            f"{recipe.gradients.format.upper()}, and its gradients are never reduced in bf16: leave the flag out, or "
            "set --recipe-override gradients.accumulation=buffer"
        )


def check_saved_activations(config: Config, recipe: Recipe) -> None:
    """Reject options under which layers do not save activations in the recipe's formats, if it has any.

    Raises:
        UserError: names the option.
    """
    why = {
        "transformer_impl": ("local", "only this project's layers save them so"),
        "no_lowprec_linears": (False, "Megatron-core's linear layers save their own inputs"),
    }
    if config.recompute_granularity == "full":
        why["recompute_granularity"] = (None, "recomputed layers save no activations")
    formats = [name for name, form in recipe.activations.formats.items() if form != "none"]
    for name, (supported, reason) in why.items():
        if formats and getattr(config, name) != supported:
            raise UserError(
                f"{flag(name)} {getattr(config, name)} was given, but recipe {recipe.name} saves activations in "
                f"formats of its own, and {reason}: leave the flag out, or set --recipe-override "
                + " ".join(f"activations.{name}=none" for name in formats)
            )
