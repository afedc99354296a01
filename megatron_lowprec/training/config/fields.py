"""Declares options as dataclass fields, and accesses values filled by ``resolve``."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from megatron_lowprec.errors import UserError


def arg(default: Any, help: str) -> Any:
    """A field with its help text; each configuration gets a fresh copy of a list."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def require(value: int | None) -> int:
    """A size filled by ``resolve``."""
    assert value is not None, "resolve() has not run"
    return value


def check_divisible(what: str, size: int, by_what: str, divisor: int) -> None:
    """Raise a UserError unless ``divisor`` divides ``size``."""
    if divisor < 1 or size % divisor:
        raise UserError(f"{what} {size} is not divisible by {by_what} {divisor}; change one of the two")
