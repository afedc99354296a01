"""Megatron-LM's file of precision by module (``--te-precision-config-file``) as rules of a recipe.

The file has ``configs``, each with one of TransformerEngine's recipes, and ordered ``matchers``: the first whose glob
matches a module's path selects its config. A module without a match runs what the other flags say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.yaml_text import read_yaml_file

RECIPES: dict[tuple[str, str], str] = {
    ("tensorwise", "hybrid"): "fp8_current",
    ("blockwise", "e4m3"): "fp8_blockwise",
    ("mxfp8", "e4m3"): "mxfp8",
    ("mxfp8", "hybrid"): "mxfp8_e5m2_grad",
}
"""``fp8_quantization_recipe`` and ``fp8_format`` -> the recipe whose GEMMs are TransformerEngine's."""

_FACTORIES = "megatron_lowprec.te."
_FLAG = "--te-precision-config-file"
_DEFAULTS: dict[str, Any] = {
    "fp8_quantization_recipe": None,
    "fp4_quantization_recipe": None,
    "custom_recipe_factory": None,
    "fp8_format": "e4m3",
    "override_quantized_autocast": True,
    "override_nonquantized_autocast": False,
    "tp_only_amax_red": False,
    "fp8_param": False,
    "fp4_param": False,
}
_READ = ("fp8_quantization_recipe", "custom_recipe_factory", "fp8_format", "override_quantized_autocast")


def rules_of_precision_file(path: str) -> list[dict[str, Any]]:
    """The file's enabled matchers as ``rules`` of a recipe, for a recipe that quantizes.

    Raises:
        UserError: not such a file; a matcher or config that no rule expresses, by its name.
    """
    data = read_yaml_file(Path(path), f"{_FLAG} {path}", "it is Megatron-LM's YAML with configs and matchers")
    if not isinstance(data, Mapping) or not isinstance(data.get("matchers"), Mapping):
        raise UserError(f"{_FLAG} {path} holds {type_of(data)}, but must be a mapping with configs and matchers")
    configs, rules = data.get("configs") or {}, []
    for name, matcher in data["matchers"].items():
        where = f"{_FLAG} {path}: matcher {name}"
        if not isinstance(matcher, Mapping):
            raise UserError(f"{where} is {matcher!r}, but must have config, type, pattern and enabled")
        if not matcher.get("enabled", False):
            continue
        if matcher.get("type") != "glob" or not isinstance(matcher.get("pattern"), str):
            raise UserError(f"{where} has type {matcher.get('type')!r}; only glob with a pattern is read: disable it")
        config = matcher.get("config")
        if not isinstance(config, str) or not isinstance(configs, Mapping) or config not in configs:
            raise UserError(f"{where} has config {config!r}, but configs has {', '.join(map(str, configs))}")
        rules.append({"modules": [matcher["pattern"]], **_gemms(f"{_FLAG} {path}: config {config}", configs[config])})
    return rules


def _gemms(where: str, config: Any) -> dict[str, str]:
    """``{"gemms": name of a recipe}``; empty for the GEMMs that the other flags select."""
    fields = config if isinstance(config, Mapping) else {}
    kind = fields.get("transformer_engine_config_type")
    if kind != "TEQuantizationParams" or not isinstance(fields.get("training_recipe"), Mapping):
        raise UserError(f"{where} has transformer_engine_config_type {kind!r}; only TEQuantizationParams is read")
    given = fields["training_recipe"]
    if fields.get("evaluation_recipe", given) != given:
        raise UserError(f"{where} has another evaluation_recipe, but a recipe evaluates as it trains: leave it out")
    unread = [key for key, value in given.items() if key not in _READ and value != _DEFAULTS.get(key, ...)]
    if unread:
        raise UserError(f"{where} has {', '.join(f'{key}: {given[key]}' for key in unread)}, which no rule expresses")
    chosen = {**_DEFAULTS, **given}
    if not chosen["override_quantized_autocast"]:
        return {}
    if chosen["fp8_quantization_recipe"] is None:
        return {"gemms": "bf16"}
    names = ("fp8_quantization_recipe", "fp8_format", "custom_recipe_factory")
    scaling, format, factory = (str(chosen[name]) for name in names)
    if scaling == "custom" and factory.startswith(_FACTORIES):
        return {"gemms": load_recipe(factory.removeprefix(_FACTORIES)).name}
    name = RECIPES.get((scaling, format))
    if name is None:
        known = ", ".join(" ".join(each) for each in RECIPES)
        raise UserError(f"{where} has recipe {scaling} in {format}; rules have {known}")
    return {"gemms": name}
