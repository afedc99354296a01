"""Recipes in unmodified Megatron-LM: ``pretrain_gpt.py --spec megatron_lowprec.specs mxfp4_rht_sr``.

Megatron-LM imports the second word of ``--spec`` from the first. This package answers every recipe's name with a layer
spec: a registered recipe, an entry point's, or a YAML file, with overrides behind it in the same word:

    --spec megatron_lowprec.specs "mxfp8 keep_bf16.last_layers=1"

A package, not a module: only of a package Python's import asks ``__getattr__`` for a name that is not defined. Megatron
is imported with the first name.
"""

from typing import Any

from megatron_lowprec.recipe.parsing import load_recipe


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    recipe, *overrides = name.split()
    recipe_to_run = load_recipe(recipe, overrides)
    from megatron_lowprec.mcore.layer_spec import layer_spec

    # Megatron-LM then reads the name from the module's dictionary
    spec = globals()[name] = layer_spec(recipe_to_run)
    return spec
