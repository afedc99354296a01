"""Loads recipes from names, YAML files and ``key=value`` overrides, and converts them to plain dicts.

A recipe file has a base and the fields that differ::

    base: mxfp4_rht_sr
    name: mxfp4_rht128_sr
    dgrad: {hadamard: {block: 128}}
    wgrad: {hadamard: {block: 128}}
"""

import dataclasses
import difflib
import os
import re
import sys
import typing
import warnings
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.recipe.field_types import field_types, fits, without_none
from megatron_lowprec.recipe.recipe import Phase, Recipe, Rule
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, LinearRecipe, QuantSpec, check_operands
from megatron_lowprec.recipe.yaml_text import read_yaml_file, read_yaml_text
from megatron_lowprec.shipped import find

T = TypeVar("T")
_CHANGES = ("rules", "phases")  # fields that are lists of changes of GEMMs

RecipeLike: TypeAlias = Recipe | str | os.PathLike[str]
"""A Recipe, the name of one, or the path of a YAML file."""


def load_recipe(name_or_file: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or YAML file, ``overridden``.

    ``GEMMS+STATE`` names two recipes: the GEMMs of one, with optimizer state, gradients and weights of the other.

    Raises:
        UserError: unknown recipe or file, with the nearest names; as ``overridden``.
    """
    path = find(name_or_file, "" if name_or_file in recipes() else "configs/recipes")
    recipe = _from_file(path) if _is_file(str(path)) else _named_recipe(name_or_file)
    return overridden(recipe, overrides)


def as_recipe(recipe: RecipeLike) -> Recipe:
    """A recipe as it is, or the one of a name or a YAML file; UserError for anything else."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | os.PathLike):
        return load_recipe(os.fspath(recipe))
    raise UserError(f"got {type_of(recipe)} as recipe: give a Recipe, the name of one, or a YAML file")


def same_numerics(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes differ at most in name, summary and source."""
    return dataclasses.replace(one, name=other.name, summary=other.summary, source=other.source) == other


def overridden(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with overrides such as ``dgrad.hadamard.block=128`` applied in order.

    A value is parsed as YAML (``null`` removes an operand, a transform or all of a GEMM). Overrides are appended to the
    recipe's name, so that no log shows a published name for a changed recipe; summary and source are marked likewise.

    Raises:
        UserError: unknown field, with the nearest names; a value of the wrong type or not among its choices.
    """
    if not overrides:
        return recipe
    data = recipe_to_dict(recipe)
    given = set()
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise UserError(
                f"--recipe-override {override!r} has no value: write FIELD=VALUE, such as dgrad.hadamard.block=128"
            )
        value = read_yaml_text(text, f"--recipe-override {override}")
        given.add(path.strip())
        for key in reversed(path.strip().split(".")):
            value = {key: value}
        _merge(Recipe, data, value, "")
    if "name" not in given:
        data["name"] = "+".join([data["name"], *overrides])
    _check_new_operands(recipe, data)
    return _marked_as_changed(recipe_from_dict(data), recipe, given)


class UnknownAttributeError(UserError, AttributeError):
    """No recipe has a name that a module was asked for; an AttributeError as well, since pickle asks every module."""


def recipe_of_attribute(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """``load_recipe`` for a module's ``__getattr__``.

    Raises:
        UserError: as ``load_recipe``; for an import statement and for Megatron-core no AttributeError, which they
            would replace by an error of their own, without the reason.
    """
    try:
        return load_recipe(name, overrides)
    except UserError as error:
        asks = sys._getframe(2).f_globals.get("__name__", "")
        if asks.startswith(("importlib.", "megatron.core.")):
            raise
        raise UnknownAttributeError(str(error)) from None


def recipe_to_dict(recipe: LinearRecipe) -> dict[str, Any]:
    """Nested dicts, lists, strings and numbers, including defaults; ``recipe_from_dict`` inverts it.

    Rules and phases are left out if there are none, and hold only what they set.
    """
    data = _plain(dataclasses.asdict(recipe))
    for name in _CHANGES:
        data.pop(name, None)
        if changes := [_given(change) for change in getattr(recipe, name, ())]:
            data[name] = changes
    return data


def recipe_from_dict(data: Mapping[str, Any]) -> Recipe:
    """The recipe of such a dict; UserError for unknown fields and wrong types."""
    return build(Recipe, _with_gemms(data))


def _given(change: Rule | Phase) -> dict[str, Any]:
    """The fields that a rule or a phase sets; a GEMM in the compute dtype is None."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(change):
        value = getattr(change, field.name)
        if isinstance(value, GemmSpec):
            given[field.name] = None if value == GemmSpec() else _plain(dataclasses.asdict(value))
        elif value and field.name == "rules":
            given["rules"] = [_given(rule) for rule in value]
        elif value != field.default:
            given[field.name] = _plain(value)
    return given


def _with_gemms(data: Any) -> Any:
    """A recipe's, rule's or phase's fields with GEMMs as mappings, where they are null or the name of a recipe.

    ``gemms`` of a rule or a phase sets all three.
    """
    if not isinstance(data, Mapping):
        return data
    found = dict(data)
    if isinstance(whole := found.get("gemms"), str):
        found = {**dict.fromkeys(GEMM_OPERANDS, whole), **found}
        del found["gemms"]
    for gemm in GEMM_OPERANDS.keys() & found:
        value = found[gemm]
        if isinstance(value, str):
            found[gemm] = _plain(dataclasses.asdict(get_recipe(value).gemms[gemm]))
        elif value is None:
            found[gemm] = {}
        elif isinstance(value, Mapping):  # before a foreign operand is refused for the fields that it lacks
            check_operands(gemm, value)
    for name in _CHANGES:
        if isinstance(found.get(name), list | tuple):
            found[name] = [_with_gemms(change) for change in found[name]]
    return found


def in_current_form(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stored ``recipe_to_dict`` of any version under present fields, lacking ones by default; as it is if invalid."""
    try:
        return recipe_to_dict(recipe_from_dict({"summary": "", **stored}))
    except (UserError, TypeError):
        return stored


def _check_new_operands(recipe: Recipe, data: Mapping[str, Any]) -> None:
    """Reject overrides of single fields of an operand that the recipe does not quantize."""
    for gemm, operands in GEMM_OPERANDS.items():
        for operand in operands:
            fields = data[gemm].get(operand) if isinstance(data[gemm], Mapping) else None
            lacking = _lacking(fields) if isinstance(fields, Mapping) else set()
            if lacking and getattr(recipe.gemms[gemm], operand) is None:
                path = f"{gemm}.{operand}"
                raise UserError(
                    f"recipe {recipe.name} does not quantize {path}: give --recipe a recipe that does, or override "
                    f"{' and '.join(f'{path}.{name}' for name in sorted(lacking))} as well"
                )


def _lacking(fields: Mapping[str, Any]) -> set[str]:
    """Names, in shorthand, of the required fields that are not among an operand's."""
    scale = fields.get("scale")
    return {"format", "granularity"} - fields.keys() - (scale.keys() if isinstance(scale, Mapping) else set())


def _marked_as_changed(recipe: Recipe, base: Recipe, given: Container[str]) -> Recipe:
    """The recipe, with ``base`` named as the origin of the summary and the source that are not ``given``.

    Without a mark a log would show a paper's reference for numerics that are not the paper's.
    """
    if same_numerics(recipe, base):
        return recipe
    origin = f"changed from {base.name}"
    marks = {
        "summary": f"{origin}: {base.summary}",
        "source": f"{origin} ({base.source})" if base.source else origin,
    }
    new: dict[str, Any] = {
        name: mark
        for name, mark in marks.items()
        if name not in given and not getattr(base, name).startswith("changed from ")  # a change of a change
    }
    return dataclasses.replace(recipe, **new)


def _named_recipe(text: str) -> Recipe:
    """The recipe of a name, or of ``GEMMS+STATE``: GEMMs of one recipe with the training state of another.

    Raises:
        UserError: an unknown name, or a second recipe without optimizer state, gradients or weights of its own.
    """
    name, plus, of_state = text.partition("+")
    recipe = get_recipe(name)
    if not plus:
        return recipe
    state = get_recipe(of_state)
    if not state.changes_training:
        raise UserError(
            f"--recipe {text} takes optimizer state, gradients and weights from {of_state}, which has Megatron-core's; "
            "give a recipe such as fp8_lm_o2 after the +"
        )
    return dataclasses.replace(
        recipe,
        name=text,
        summary=f"GEMMs of {name}; optimizer state, gradients and storage of weights of {of_state}",
        source="; ".join(source for source in (recipe.source, state.source) if source),
        optimizer=state.optimizer,
        gradients=state.gradients,
        fp8_weights=state.fp8_weights,
    )


def _is_file(name: str) -> bool:
    """Whether a recipe's name is a path: recipe names have no slash."""
    return name.endswith((".yaml", ".yml")) or "/" in name


def _from_file(path: Path) -> Recipe:
    if path.is_dir():
        raise UserError(
            f"--recipe {path} is a folder: give a YAML file in it, or the name of a recipe; --list-recipes prints them"
        )
    if not path.is_file():
        raise UserError(f"recipe file {path} does not exist; give a file that does, or a name from --list-recipes")
    data = read_yaml_file(path, str(path), "a recipe file is YAML such as 'base: mxfp4_rht_sr'")
    if not isinstance(data, dict):
        raise UserError(f"{path} holds {type_of(data)}, but a recipe file is a mapping such as 'base: mxfp4_rht_sr'")
    if "num-layers" in data or "num_layers" in data:
        raise UserError(f"{path} is the configuration of a model: give it as --config, and as --recipe a recipe")
    base = data.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise UserError(f"{path}: base is {base!r}, but must be the name of a recipe; --list-recipes prints them")
    try:
        for key in data:
            _check_key(Recipe, key, "", more=("base",))
        if base is None:
            return recipe_from_dict({"name": path.stem, "summary": f"from {path.name}", **data})
        origin = _named_recipe(base)
        merged = recipe_to_dict(origin)
        _merge(Recipe, merged, {"name": path.stem, **data}, "")
        return _marked_as_changed(recipe_from_dict(merged), origin, data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


_RENAMED = {"tile": "granularity"}  # fields of recipe files, overrides and checkpoints of version 0.1
_SHORTHAND = {"granularity": "granularity", "scale_format": "format", "scale_rule": "rule", "amax_floor": "amax_floor"}
"""Field of an operand in recipe files, overrides and older checkpoints -> field of its ``scale``."""


def _current_keys(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` under present field names, shorthand for an operand's scale included; an old name warns once."""
    if cls is not QuantSpec:
        return dict(data)
    current: dict[str, Any] = {}
    for key, value in data.items():
        new = _RENAMED.get(key, key)
        if new != key:
            warnings.warn(f"recipe field {key} is called {new} now; the next release drops the old name", stacklevel=2)
        if new not in _SHORTHAND:
            current[new] = {**current.get(new, {}), **value} if new == "scale" and isinstance(value, Mapping) else value
        elif isinstance(scale := current.setdefault("scale", {}), dict):
            scale[_SHORTHAND[new]] = value
    return current


def _check_key(cls: type, key: object, where: str, more: Sequence[str] = ()) -> None:
    known = [*field_types(cls), *more]
    if key not in known:
        known += _SHORTHAND if cls is QuantSpec else ()
        near = difflib.get_close_matches(str(key), known, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
        raise UserError(f"{_named(cls, where)} has no field {key!r}: {hint}")


def _named(cls: type, where: str) -> str:
    return where or f"the {cls.__name__.lower()}"


def _merge(cls: type, data: dict[str, Any], changes: Mapping[str, Any], where: str) -> None:
    for key, value in _current_keys(cls, changes).items():
        _check_key(cls, key, where)
        inner, _ = without_none(field_types(cls)[key])
        if dataclasses.is_dataclass(inner) and isinstance(inner, type) and isinstance(value, Mapping):
            if data.get(key) is None:
                data[key] = {}
            if not isinstance(data[key], dict):
                path = f"{where}.{key}".lstrip(".")
                raise UserError(
                    f"{path} is set to {data[key]!r}, which has no fields: set {path}.{next(iter(value))} only"
                )
            _merge(inner, data[key], value, f"{where}.{key}".lstrip("."))
        else:
            data[key] = value


def _required(cls: type) -> set[str]:
    """Names of the fields without a default."""
    return {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }


def build(cls: type[T], data: Any, where: str = "") -> T:
    """A dataclass from a nested mapping; lists become tuples.

    Raises:
        UserError: an unknown or missing field, or one of another type, named by its path below ``where``.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"{_named(cls, where)} is {data!r}, but must be a mapping of fields")
    hints = field_types(cls)
    values = {}
    for key, value in _current_keys(cls, data).items():
        _check_key(cls, key, where)
        values[key] = _value(hints[key], value, f"{where}.{key}".lstrip("."))
    missing = [name for name in hints if name in _required(cls) - values.keys()]
    missing = ["granularity" if cls is QuantSpec and name == "scale" else name for name in missing]
    if missing:
        values_of = "it a value" if len(missing) == 1 else "them values"
        raise UserError(f"{_named(cls, where)} lacks {' and '.join(missing)}: give {values_of}")
    try:
        return cls(**values)
    except UserError as error:
        # The field is known here; the error describes the value.
        raise UserError(f"{where}: {error}" if where else str(error)) from None


def _value(hint: Any, value: Any, where: str) -> Any:
    hint, optional = without_none(hint)
    if value is None and optional:
        return None
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        # null is a part of a recipe that changes nothing, such as a GEMM that is not quantized
        return build(hint, {} if value is None and not _required(hint) else value, where)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        hint = str  # the dataclass checks the value and names all choices
    elif origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            example = " such as ['layers.1.*']" if parts[0] is str else ""
            raise UserError(f"{where} is {value!r}, but must be a list{example}")
        if parts[-1] is not ... and len(value) != len(parts):
            raise UserError(f"{where} is {value!r}, but must be a list of {len(parts)}")
        places = [where] * len(value)
        if dataclasses.is_dataclass(parts[0]):
            places = [f"{where}[{i}]" for i in range(len(value))]
        return tuple(_value(parts[0], item, place) for item, place in zip(value, places, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not fits(value, hint):
        note = ""
        if hint is float and isinstance(value, str):
            note = "; YAML reads a number without a point, such as 3e-4, as text: write 3.0e-4"
        elif hint is int and isinstance(value, str) and re.fullmatch(r"[0-9.]+e[0-9]+", value):
            note = "; YAML reads 33e9 as text: write 33_000_000_000"
        raise UserError(f"{where} is {value!r} ({type(value).__name__}), but must be {hint.__name__}{note}")
    return value
