"""Reads config.yaml, the resolved options, recipe and schedule of a run or of a checkpoint. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.recipe.yaml_text import read_yaml_file
from megatron_lowprec.training.config.arguments import KINDS, RENAMED, checked_value

_PARTS: Mapping[str, type] = {
    **dict.fromkeys(
        ("options", "recipe", "schedule", "progress", "layout", "tokenizer", "versions", "started_from"), dict
    ),
    **dict.fromkeys(("earlier_recipes", "earlier_options"), list),
    "padded_vocab_size": int,
    "initial_weights": str,
}
_COUNTS = ("progress", "layout")


def read_run_config(path: Path) -> dict[str, Any]:
    """The content by its keys; options that this version knows have values of their types, all others are kept.

    Raises:
        UserError: no such file, no YAML, or a part or an option of another type.
    """
    content = read_yaml_file(path, str(path), "name a folder that has one")
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys and values at the top, found {type_of(content)}")
    for name, kind in _PARTS.items():
        if type(content.get(name, kind())) is not kind:
            raise UserError(f"{path}: {name} is {type_of(content[name])}, not a {kind.__name__}")
    for name in _COUNTS:
        for key, value in content.get(name, {}).items():
            if type(value) is not int or value < -1:
                raise UserError(f"{path}: {name}: {key} is {value!r}, not a count")
    name = content.get("recipe", {}).get("name", "")
    if type(name) is not str:
        raise UserError(f"{path}: recipe: name is {name!r}, not text")
    if "options" in content:
        content["options"] = _options(path, content["options"])
    if "earlier_options" in content:
        content["earlier_options"] = [_options(path, each) for each in content["earlier_options"]]
    return content


def _options(path: Path, options: object) -> dict[str, Any]:
    if not isinstance(options, dict):
        raise UserError(f"{path}: options are {type_of(options)}, not keys and values")
    found = {}
    for name, value in options.items():
        kind = KINDS.get(RENAMED.get(str(name), str(name)))
        if kind is not None:
            # Another version may have had other choices.
            value = checked_value(f"{path}: options: {name}", replace(kind, choices=None), value)
        found[name] = value
    return found
