"""Recipes in TransformerEngine: its own recipe objects, and quantizer factories for unmodified Megatron-LM.

    te.autocast(recipe=te_recipe("fp8_current"))

    --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe custom
    --fp8-quantizer-factory megatron_lowprec.te.fp8_current

Megatron-LM imports what is before the last dot and reads the rest from it. This package answers every registered
recipe's name with its factory. A factory of another recipe belongs into a module of yours:

    factory = quantizer_factory(load_recipe("my.yaml"))

TransformerEngine is imported with the first object.
"""

from typing import Any

from megatron_lowprec.recipe.parsing import load_recipe, recipe_of_attribute
from megatron_lowprec.te.factory import QuantizerFactory, quantizer_factory
from megatron_lowprec.te.recipe_objects import te_recipe

__all__ = ["QuantizerFactory", "load_recipe", "quantizer_factory", "te_recipe"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    factory = globals()[name] = quantizer_factory(recipe_of_attribute(name))
    return factory
