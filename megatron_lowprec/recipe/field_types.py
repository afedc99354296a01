"""Types of a recipe's fields, checked when a dataclass is built in Python; YAML values pass ``parsing`` first."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from megatron_lowprec.errors import UserError


@contextmanager
def named_place(where: str) -> Iterator[None]:
    """Puts the place in front of a UserError, unless it is the recipe itself."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from None


def check_fields(spec: Any) -> None:
    """Reject values of a dataclass that do not have the types of its annotations; a list becomes a tuple.

    Raises:
        UserError: names the field, the value, and its type or its choices.
    """
    for name, hint in field_types(type(spec)).items():
        value = getattr(spec, name)
        if isinstance(value, list) and typing.get_origin(without_none(hint)[0]) is tuple:
            value = tuple(value)
            object.__setattr__(spec, name, value)
        if not fits(value, hint):
            inner, optional = without_none(hint)
            choices = typing.get_args(inner) if typing.get_origin(inner) is Literal else ()
            choices += ("null",) if choices and optional else ()
            allowed = f"one of {', '.join(choices)}" if choices else described(hint)
            raise UserError(f"{name} is {value!r}, but must be {allowed}")


def field_types(cls: type) -> dict[str, Any]:
    """Field -> its annotation, resolved."""
    return _field_types(cls)


@cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def without_none(hint: Any) -> tuple[Any, bool]:
    """``hint``, or the type in ``hint | None``, and whether None is allowed."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (option,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
        return option, True
    return hint, False


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of an annotation's type; an integer is also a float, a bool is no number."""
    hint, optional = without_none(hint)
    if value is None:
        return optional
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, parts[0]) for item in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def described(hint: Any) -> str:
    """An annotation's type in an error."""
    hint, optional = without_none(hint)
    if typing.get_origin(hint) is tuple:
        text = f"a tuple of {typing.get_args(hint)[0].__name__}"
    elif dataclasses.is_dataclass(hint):
        text = f"a {hint.__name__}"  # type: ignore[union-attr]  # a class
    else:
        text = {int: "an integer", float: "a number", bool: "True or False"}.get(hint, hint.__name__)
    return f"{text} or None" if optional else text
