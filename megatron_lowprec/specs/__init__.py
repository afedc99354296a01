"""Recipes in unmodified Megatron-LM: ``pretrain_gpt.py --spec megatron_lowprec.specs mxfp4_rht_sr``.

Megatron-LM imports the second word of ``--spec`` from the first. This package answers every recipe's name with a layer
spec: a registered recipe, an entry point's, or a YAML file, with overrides behind it in the same word:

    --spec megatron_lowprec.specs "mxfp8 keep_bf16.last_layers=1"

Two flags of this project's driver are taken there as well: ``--moe-fp8-dispatch`` sends tokens to their experts as
codes, ``--fp8-sequence-parallel-gather`` gathers activations and gradients as codes.

A package, not a module: only of a package Python's import asks ``__getattr__`` for a name that is not defined. Megatron
is imported with the first name.
"""

from typing import Any

from megatron_lowprec.recipe.parsing import recipe_of_attribute

_FLAGS = {"--moe-fp8-dispatch": "fp8_dispatch", "--fp8-sequence-parallel-gather": "fp8_gather"}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    recipe, *words = name.split()
    overrides = [word for word in words if word not in _FLAGS]
    recipe_to_run = recipe_of_attribute(recipe, overrides)
    from megatron_lowprec.mcore.layer_spec import layer_spec

    # Megatron-LM then reads the name from the module's dictionary
    spec = globals()[name] = layer_spec(recipe_to_run, **{_FLAGS[word]: True for word in words if word in _FLAGS})
    return spec
