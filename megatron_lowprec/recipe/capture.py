"""Which recipes' layers CUDA graphs can hold."""

from megatron_lowprec.recipe.recipe import Recipe


def why_not_captured(recipe: Recipe, several_microbatches: bool) -> tuple[str, list[str]] | None:
    """Why no CUDA graph can hold the recipe's layers, and overrides that change it; None if it can."""
    if several_microbatches and recipe.gradients.accumulation == "fp32":
        reason = f"recipe {recipe.name} sums a step's microbatches in fp32 at changing addresses"
        return reason, ["gradients.accumulation=format"]
    formats = [name for name, form in recipe.activations.formats.items() if form != "none"]
    if formats:
        return f"recipe {recipe.name} saves activations in formats of its own", [
            f"activations.{name}=none" for name in formats
        ]
    return None
