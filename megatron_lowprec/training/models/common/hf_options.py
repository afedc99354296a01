"""Reads a Hugging Face model's config.json, and compares options with those of its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config

_NULLABLE = (
    "n_inner",
    "head_dim",
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
)  # null is a value of its own
_LARGEST = 1e300  # less than any infinity, and not greater than NaN
_KINDS: Mapping[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number, 0 or more", (int,)),
    float: ("a finite number", (int, float)),
}


def differing_options(config: Config, options: Mapping[str, Any]) -> list[str]:
    """Options whose values differ, as flags with the configuration's values."""
    return [
        f"--{name.replace('_', '-')} {getattr(config, name)}"
        for name, value in options.items()
        if getattr(config, name) != value
    ]


def completed(hf: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """config.json under one name for each key, with ``defaults`` for the keys that it lacks.

    Args:
        defaults: of transformers' configuration class; they also give the types.
        aliases: transformers' second names of keys, which have precedence.

    Raises:
        UserError: a value of another type.
    """
    found = {**defaults, **_flat(hf, aliases)}
    for name, default in defaults.items():
        value = found[name]
        if value is None and name in _NULLABLE:
            continue
        words, types = _KINDS[int if default is None else type(default)]
        fits = isinstance(value, types) and isinstance(value, bool) == (types == (bool,))
        if not fits or not abs(value) < _LARGEST or (types == (int,) and value < 0):
            raise UserError(f"config.json has {name} {value!r}; it must be {words}")
    return found


def absent(hf: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The defaults that ``completed`` adds, without those of None."""
    given = _flat(hf, aliases)
    return {name: value for name, value in defaults.items() if value is not None and name not in given}


def _flat(hf: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    found = {name: value for name, value in hf.items() if name not in aliases}
    found |= {aliases[name]: value for name, value in hf.items() if name in aliases}
    rope = rope_of(hf)
    return found | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})


def rope_of(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of rope: transformers 5 has all of them in rope_parameters, 4 those of a scaling in rope_scaling."""
    found = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise UserError(f"config.json has rope options {found!r}; only those of one plain rope can be read")
    return found
