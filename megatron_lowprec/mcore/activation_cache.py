"""Binds to a transformer layer in which form it saves activations: a recipe's formats, or those of --save-memory."""

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.mcore.layers.attention import SdpaAttention
from megatron_lowprec.mcore.layers.cached_swiglu import CachedSwigluMLP
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecRowParallelLinear
from megatron_lowprec.recipe.recipe import Recipe

_RECOMPUTED_MLPS = {"mlp", "moe", "moe_act", "shared_experts"}


def bind_activations(recipe: Recipe, layer: TransformerLayer, save_memory: bool = False) -> None:
    """Set the formats in which a layer saves activations; none if the recipe has none.

    ``save_memory``: linear_proj saves no operand of wgrad beside attention's output, but casts that again.

    Raises:
        UserError: a module or an option of the layer under which the activation is not saved by this project.
    """
    if recipe.activations.quantized:
        _check_config(recipe, layer.config)
    attention, spec = layer.self_attention, recipe.activations
    if hasattr(attention, "linear_proj"):
        _bind_attention(attention, spec.attention_output)
        # a delayed scale must be the forward pass's
        again = save_memory and not recipe.moves_within_steps and _saves_output(attention)
        attention.linear_proj.casts_again = again
    mlps = [module for module in layer.mlp.modules() if isinstance(module, MLP)]
    for mlp in mlps:
        cached = isinstance(mlp, CachedSwigluMLP) and isinstance(mlp.linear_fc2, LowPrecRowParallelLinear)
        if spec.swiglu_input != "none" and not (cached and mlp.has_swiglu()):
            raise UserError(
                f"activations.swiglu_input={spec.swiglu_input} caches the input of SwiGLU in this project's MLPs; "
                f"found {type(mlp).__name__} with activation {getattr(mlp.activation_func, '__name__', '?')}: build "
                "the layers with low_precision(spec) and SwiGLU without variants, or set activations.swiglu_input=none"
            )
        if cached:
            mlp.swiglu_format = FORMATS.get(spec.swiglu_input)


def _saves_output(attention: Any) -> bool:
    """Whether core attention saves its output; else linear_proj's codes of it take less than the output itself."""
    return not (isinstance(attention.core_attention, DotProductAttention) or attention.checkpoint_core_attention)


def _bind_attention(attention: Any, form: str) -> None:
    core, proj = attention.core_attention, attention.linear_proj
    known = isinstance(core, SdpaAttention | DotProductAttention) and isinstance(proj, LowPrecRowParallelLinear)
    if form != "none" and not known:
        raise UserError(
            f"activations.attention_output={form} replaces the output that core attention and linear_proj save; found "
            f"{type(core).__name__} and {type(proj).__name__}: build the layers with low_precision(spec), or set "
            "activations.attention_output=none"
        )
    if isinstance(proj, LowPrecRowParallelLinear):
        proj.input_format = FORMATS.get(form)
    if isinstance(core, SdpaAttention):
        core.output_format = FORMATS.get(form)


def _check_config(recipe: Recipe, config: Any) -> None:
    """Reject options that recompute, capture or store the same activations."""
    selective = config.recompute_granularity == "selective" and recipe.activations.swiglu_input != "none"
    recomputed = _RECOMPUTED_MLPS & set(getattr(config, "recompute_modules", None) or ()) if selective else ()
    found = {
        "recompute_granularity full": config.recompute_granularity == "full",
        f"recompute_modules {' '.join(sorted(recomputed))}": bool(recomputed),
        "moe_shared_expert_overlap": getattr(config, "moe_shared_expert_overlap", False),
        "activation_func_fp8_input_store": getattr(config, "activation_func_fp8_input_store", False),
        "cpu_offloading": getattr(config, "cpu_offloading", False),
    }
    for option, given in found.items():
        if given:
            raise UserError(
                f"recipe {recipe.name} saves activations in a format, and {option} recomputes, stores or moves them "
                "otherwise: leave that option out, or set activations.attention_output=none and "
                "activations.swiglu_input=none"
            )
