"""Recipes as nested dicts and back: present and older field names, shorthand, and GEMMs taken from other recipes."""

import copy
import dataclasses
import difflib
import re
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.field_types import field_types, fits, named_place, without_none
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.recipe import Phase, Recipe, Rule
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.schema import (
    GEMM_OPERANDS,
    GemmSpec,
    HadamardSpec,
    LinearRecipe,
    QuantSpec,
    check_operands,
)

T = TypeVar("T")
_CHANGES = ("rules", "phases")  # fields that are lists of changes of GEMMs
_NOT_NUMERICS = ("name", "summary", "source")


def recipe_to_dict(recipe: LinearRecipe) -> dict[str, Any]:
    """Nested dicts, lists, strings and numbers, including defaults; ``recipe_from_dict`` inverts it.

    Rules and phases are left out if there are none, and hold only what they set.
    """
    data = copied(dataclasses.asdict(recipe))
    for name in _CHANGES:
        data.pop(name, None)
        if changes := [_given(change) for change in getattr(recipe, name, ())]:
            data[name] = changes
    return data


def flattened(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """``recipe_to_dict``'s numerics as ("fprop.input.format", "e4m3") and so on; what is absent is "none"."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}.")
        elif name not in _NOT_NUMERICS:
            yield name, "none" if value is None else str(value)


def recipe_from_dict(data: Mapping[str, Any]) -> Recipe:
    """The recipe of such a dict; UserError for unknown fields and wrong types."""
    return build(Recipe, _with_gemms(data))


def _given(change: Rule | Phase) -> dict[str, Any]:
    """The fields that a rule or a phase sets; a GEMM in the compute dtype is None."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(change):
        value = getattr(change, field.name)
        if isinstance(value, GemmSpec):
            given[field.name] = None if value == GemmSpec() else copied(dataclasses.asdict(value))
        elif value and field.name == "rules":
            given["rules"] = [_given(rule) for rule in value]
        elif value != field.default:
            given[field.name] = copied(value)
    return given


def _with_gemms(data: Any, base: Mapping[str, Any] | None = None, where: str = "") -> Any:
    """A recipe's, rule's or phase's fields with whole GEMMs, where they are null, the name of a recipe or some fields.

    ``gemms`` of a rule or a phase sets all three. Fields change those of ``gemms``, or of ``base``: the GEMMs that the
    rule or the phase stands in for.
    """
    if not isinstance(data, Mapping):
        return data
    found, base = dict(data), dict(base or {})
    if "gemms" in found:
        base = _gemms_of(found.pop("gemms"), f"{where}.gemms")
        found = {**base, **found}
    for gemm in (gemm for gemm in GEMM_OPERANDS if gemm in found):
        value, path = found[gemm], f"{where}.{gemm}".lstrip(".")
        if isinstance(value, Mapping):
            with named_place(where):  # before a foreign operand is refused for the fields that it lacks
                check_operands(gemm, value)
            found[gemm] = copy.deepcopy(base.get(gemm, {}))
            merge(GemmSpec, found[gemm], value, path)
        elif value is None or isinstance(value, str):
            found[gemm] = _gemms_of(value, path)[gemm]
        base[gemm] = found[gemm] if isinstance(found[gemm], Mapping) else {}
    for name in (name for name in _CHANGES if name in found):
        changes = [] if found[name] is None else found[name]
        if isinstance(changes, list | tuple):
            places = [f"{where}.{name}[{i}]".lstrip(".") for i in range(len(changes))]
            changes = [_with_gemms(change, base, place) for change, place in zip(changes, places, strict=True)]
        found[name] = changes
    return found


def _gemms_of(name: object, where: str) -> dict[str, Any]:
    """The GEMMs of a registered recipe, as mappings; of None those that are not quantized."""
    if name is not None and not isinstance(name, str):
        raise UserError(f"{where} is {name!r}, but must be the name of a recipe")
    try:
        gemms = dict.fromkeys(GEMM_OPERANDS, GemmSpec()) if name is None else get_recipe(name).gemms
    except UserError as error:
        raise UserError(f"{where} takes registered recipes, no files: {error}") from None
    return {gemm: copied(dataclasses.asdict(spec)) for gemm, spec in gemms.items()}


def in_current_form(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stored ``recipe_to_dict`` of any version under present fields, lacking ones by default; as it is if invalid."""
    try:
        return recipe_to_dict(recipe_from_dict({"summary": "", **stored}))
    except (UserError, TypeError):
        return stored


def copied(value: Any) -> Any:
    """Nested dicts and lists of no common object; tuples become lists."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, tuple | list) else value


_RENAMED = {"tile": "granularity"}  # fields of recipe files, overrides and checkpoints of version 0.1
_EXAMPLES: Mapping[type, str] = {
    ScaleSpec: "{granularity: 1x64}",
    TensorScaleSpec: "{target: 2688.0}",
    HadamardSpec: "{block: 64}",
}
_SHORTHAND = {"granularity": "granularity", "scale_format": "format", "scale_rule": "rule", "amax_floor": "amax_floor"}
"""Field of an operand in recipe files, overrides and older checkpoints -> field of its ``scale``."""


def _current_keys(cls: type, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``data`` under present field names, shorthand for an operand's scale included; an old name warns once.

    Raises:
        UserError: two values for one field of the scale.
    """
    if cls is not QuantSpec:
        return dict(data)
    current: dict[str, Any] = {}
    for key, value in data.items():
        new = _RENAMED.get(key, key)
        if new != key:
            warnings.warn(f"recipe field {key} is called {new} now; the next release drops the old name", stacklevel=2)
        given = {_SHORTHAND[new]: value} if new in _SHORTHAND else value
        if new not in _SHORTHAND and (new != "scale" or not isinstance(value, Mapping)):
            current[new] = value
        elif isinstance(scale := current.setdefault("scale", {}), dict):
            for name in (name for name in given if scale.get(name, given[name]) != given[name]):
                raise UserError(
                    f"{where} has both {scale[name]} and {given[name]} as scale.{name}: give one of the two"
                )
            scale.update(given)
    return current


def check_key(cls: type, key: object, where: str, more: Sequence[str] = ()) -> None:
    known = [*field_types(cls), *more]
    if key not in known:
        known += ("gemms",) if cls in (Rule, Phase) else ()
        known += _SHORTHAND if cls is QuantSpec else ()
        near = difflib.get_close_matches(str(key), known, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
        raise UserError(f"{_named(cls, where)} has no field {key!r}: {hint}")


def _named(cls: type, where: str) -> str:
    return where or f"the {cls.__name__.lower()}"


def merge(cls: type, data: dict[str, Any], changes: Mapping[str, Any], where: str) -> None:
    for key, value in _current_keys(cls, changes, where).items():
        check_key(cls, key, where)
        inner, _ = without_none(field_types(cls)[key])
        if dataclasses.is_dataclass(inner) and isinstance(inner, type) and isinstance(value, Mapping):
            if data.get(key) is None:
                data[key] = {}
            elif inner is GemmSpec and isinstance(data[key], str):  # the name of a recipe, given before
                data[key] = _gemms_of(data[key], f"{where}.{key}".lstrip("."))[key]
            if not isinstance(data[key], dict):
                path = f"{where}.{key}".lstrip(".")
                raise UserError(
                    f"{path} is set to {data[key]!r}, which has no fields: set {path}.{next(iter(value))} only"
                )
            merge(inner, data[key], value, f"{where}.{key}".lstrip("."))
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
        example = f" such as {_EXAMPLES[cls]}" if cls in _EXAMPLES else ""
        raise UserError(f"{_named(cls, where)} is {data!r}, but must be a mapping of fields{example}")
    hints = field_types(cls)
    values = {}
    for key, value in _current_keys(cls, data, where).items():
        check_key(cls, key, where)
        values[key] = _value(hints[key], value, f"{where}.{key}".lstrip("."))
    missing = [name for name in hints if name in _required(cls) - values.keys()]
    missing = ["granularity" if cls is QuantSpec and name == "scale" else name for name in missing]
    if missing:
        values_of = "it a value" if len(missing) == 1 else "them values"
        raise UserError(f"{_named(cls, where)} lacks {' and '.join(missing)}: give {values_of}")
    with named_place(where):  # the field is known here; the error describes the value
        return cls(**values)


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
            if None in value:
                raise UserError(f"{places[list(value).index(None)]} is empty: give it fields, or leave it out")
        return tuple(_value(parts[0], item, place) for item, place in zip(value, places, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not fits(value, hint):
        note = ""
        if hint is float and isinstance(value, str):
            note = "; YAML reads a number without a point, such as 3e-4, as text: write 3.0e-4, and 1.0e+6 with a sign"
        elif hint is int and isinstance(value, str) and re.fullmatch(r"[0-9.]+e[0-9]+", value):
            note = "; YAML reads 33e9 as text: write 33_000_000_000"
        raise UserError(f"{where} is {value!r} ({type(value).__name__}), but must be {hint.__name__}{note}")
    return value
