"""Megatron's FP8 flags: flags of single layers are translated, the others name the recipe's field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe, recipe_to_dict
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.te.precision_file import rules_of_precision_file

# Name -> whether it is a switch. Not in Config: a run's precision is described by its recipe only.
FP8_FLAGS: dict[str, bool] = {
    "fp8_format": False,
    "fp8": False,
    "fp8_recipe": False,
    "fp8_margin": False,
    "fp8_interval": False,
    "fp8_amax_history_len": False,
    "fp8_amax_compute_algo": False,
    "fp8_wgrad": True,
    "no_fp8_wgrad": True,
    "fp4_format": False,
    "fp4_recipe": False,
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": False,
    "num_layers_at_end_in_bf16": False,
    "te_precision_config_file": False,
}

_RECIPES = {
    "delayed": "fp8_delayed",
    "tensorwise": "fp8_current",
    "blockwise": "fp8_blockwise",
    "mxfp8": "mxfp8",
}
_INSTEAD = {
    "fp8_format": "the operand formats belong to the recipe: --recipe fp8_delayed is Megatron's hybrid; "
    "--recipe-override dgrad.grad_output.format=e4m3 (and wgrad's) makes it e4m3",
    "fp8_margin": "use --recipe-override fprop.input.margin=N for each operand of the recipe",
    "fp8_interval": "scales are computed at every step; leave it out",
    "fp8_amax_history_len": "use --recipe-override fprop.input.history=N for each operand of --recipe fp8_delayed",
    "fp8_amax_compute_algo": "use --recipe-override fprop.input.history_rule=max (or most_recent) for each operand of "
    "--recipe fp8_delayed",
    "fp8_wgrad": "wgrad's precision belongs to the recipe: leave it out",
    "no_fp8_wgrad": "use --recipe-override wgrad.input=null --recipe-override wgrad.grad_output=null",
    "fp4_recipe": "use --recipe nvfp4_all for its GEMMs in all layers, or nvfp4, which leaves the last in bf16",
}
_INSTEAD["fp8"] = _INSTEAD["fp8_format"]
_INSTEAD["fp4_format"] = _INSTEAD["fp4_recipe"]


_LAYERS = {"num_layers_at_start_in_bf16": "first_layers", "num_layers_at_end_in_bf16": "last_layers"}
_TRANSLATED = (*_LAYERS, "first_last_layers_bf16", "te_precision_config_file")


def refused_fp8_flags(given: Mapping[str, Any]) -> list[str]:
    """A line for each given flag without an equivalent; it names the recipe or field to use instead."""
    lines = []
    for name, value in given.items():
        if name not in FP8_FLAGS or name in _TRANSLATED or value is False:
            continue
        shown = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
        lines.append(f"{shown}: {fp8_reason(name, str(value))}")
    return lines


def fp8_reason(name: str, value: str = "") -> str | None:
    """What to use instead of a flag with this value; None if it is translated."""
    if name == "fp8_recipe":
        return f"use --recipe {_RECIPES.get(value, 'NAME (--list-recipes)')}"
    return _INSTEAD.get(name)


def translate_fp8_flags(
    given: Mapping[str, Any], recipe: str = "bf16", overrides: Sequence[str] = (), notes: list[str] | None = None
) -> list[str]:
    """Overrides of a recipe: those equivalent to the given Megatron flags, and the run's own.

    Rules of a file are in front of the recipe's, and of those that an override gives it.

    Args:
        recipe: name or file.
        overrides: the run's own, which replace what a flag of single layers says.
        notes: gets a line about a file without rules.

    Raises:
        UserError: flags without an equivalent; the message names the recipes or fields to use instead.
    """
    refused = refused_fp8_flags(given)
    if refused:
        raise UserError("; ".join(refused))
    overrides = [*_layers_in_bf16(given), *overrides]
    path = given.get("te_precision_config_file")
    if path is None:
        return overrides
    if recipe == "bf16":
        raise UserError(
            f"--te-precision-config-file {path} changes layers that are quantized, and --recipe bf16 quantizes none: "
            "give the --recipe of the layers that no matcher selects"
        )
    rules = rules_of_precision_file(path)
    if not rules:
        if notes is not None:
            notes.append(f"--te-precision-config-file {path}: no matcher is enabled, so it changes no layer")
        return overrides
    return [*overrides, *_with_rules_in_front(rules, load_recipe(recipe, overrides), path)]


def _with_rules_in_front(rules: list[dict[str, Any]], recipe: Recipe, path: str) -> list[str]:
    """Overrides in one line of YAML each; a recipe's own rules are long there, so its name has the file's instead."""
    own = recipe_to_dict(recipe).get("rules", [])
    text = yaml.safe_dump([*rules, *own], default_flow_style=True, sort_keys=False, width=math.inf)
    named = [f"name={json.dumps(f'{recipe.name}+rules of {Path(path).name}')}"] if own else []
    return [f"rules={text.strip()}", *named]


def _layers_in_bf16(given: Mapping[str, Any]) -> list[str]:
    if not given.get("first_last_layers_bf16"):
        for name in _LAYERS:
            if name in given:
                raise UserError(
                    f"--{name.replace('_', '-')} {given[name]} does nothing without --first-last-layers-bf16; add it"
                )
        return []
    # Megatron's default keeps one layer at each end.
    counts = {name: str(given.get(name, 1)) for name in _LAYERS}
    for name, count in counts.items():
        if not count.isdecimal():
            raise UserError(f"--{name.replace('_', '-')} {count}: wants a whole number of layers")
    return [f"keep_bf16.{_LAYERS[name]}={count}" for name, count in counts.items()]
