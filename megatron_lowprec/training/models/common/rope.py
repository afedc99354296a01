"""Rope of longer contexts: Llama 3's scaling of frequencies and YaRN, in options, Megatron-core and config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.options.model_options import RopeOptions

# Megatron-core has one choice of them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def yarn_attributes(config: RopeOptions) -> dict[str, Any]:
    """Attributes that Megatron-core's GPTModel and attention read from a TransformerConfig, which has no such field."""
    if config.rope_type != "yarn":
        return {}
    return {
        "yarn_rotary_scaling_factor": config.rotary_scaling_factor,
        "yarn_original_max_position_embeddings": config.yarn_original_max_position_embeddings,
        "yarn_beta_fast": config.yarn_beta_fast,
        "yarn_beta_slow": config.yarn_beta_slow,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": True,
    }


def to_config(config: Config) -> dict[str, Any]:
    """Entries of config.json."""
    entries: dict[str, Any] = {"rope_theta": float(config.rotary_base)}
    if config.use_rope_scaling:
        entries["rope_scaling"] = {"rope_type": "llama3", "factor": config.rope_scaling_factor, **_LLAMA3}
    if config.rope_type == "yarn":
        entries["rope_scaling"] = {"rope_type": "yarn"} | {key: getattr(config, name) for key, name in _YARN.items()}
    return entries


def rope_of(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of rope: transformers 5 has all of them in rope_parameters, 4 those of a scaling in rope_scaling."""
    found = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise UserError(f"config.json has rope options {found!r}; only those of one plain rope can be read")
    return found


def from_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options from a completed config.json.

    Raises:
        UserError: another kind of rope, or a parameter that Megatron-core does not have.
    """
    rope = rope_of(hf)
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UserError(f"config.json has partial_rotary_factor {share!r}; only rope over whole heads can be read")
    if hf["rope_theta"] != int(hf["rope_theta"]):
        raise UserError(f"config.json has rope_theta {hf['rope_theta']!r}; --rotary-base is a whole number")
    options: dict[str, Any] = {"rotary_base": int(hf["rope_theta"])}
    if kind == "default":
        return options
    length = "original_max_position_embeddings"  # as transformers has it: beside the rope, in it, or the model's own
    rope = {**rope, length: hf.get(length) or rope.get(length) or hf["max_position_embeddings"]}
    if kind == "llama3":
        _require(rope, kind, _LLAMA3)
        return options | {"use_rope_scaling": True, "rope_scaling_factor": _number(rope, "factor")}
    if kind == "yarn":
        rope["mscale_all_dim"] = rope.get("mscale_all_dim") or None  # 0 is none to transformers
        _require(rope, kind, {"attention_factor": None, "truncate": True, "mscale_all_dim": None})
        found = {"beta_fast": 32, "beta_slow": 1, **{key: value for key, value in rope.items() if value is not None}}
        return options | {"rope_type": "yarn"} | {name: _number(found, key) for key, name in _YARN.items()}
    raise UserError(f"config.json has rope of type {kind!r}; default, llama3 and yarn can be read")


def plain_base(hf: Mapping[str, Any]) -> int:
    """--rotary-base from a completed config.json of a model whose layers scale no rope.

    Raises:
        UserError: as ``from_config``, or a scaled rope.
    """
    found = from_config(hf)
    if len(found) > 1:
        kind = rope_of(hf).get("rope_type", rope_of(hf).get("type"))
        raise UserError(f"config.json has rope of type {kind!r}; this model's must be the plain one")
    base: int = found["rotary_base"]
    return base


def _require(rope: Mapping[str, Any], kind: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if rope.get(name, value) != value:
            raise UserError(
                f"config.json has rope of type {kind!r} with {name} {rope[name]!r}; Megatron-core's has {value!r}"
            )


def _number(rope: Mapping[str, Any], name: str) -> Any:
    value = rope.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise UserError(f"config.json has {name} {value!r} in its rope; it must be a positive number")
    return value
