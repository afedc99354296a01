"""Declaration of options as dataclass fields, and access to values that ``resolve`` has filled."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from megatron_lowprec.errors import UserError


def arg(default: Any, help: str) -> Any:
    """A field with its help text; lists get a fresh copy a configuration."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def require(value: int | None) -> int:
    """A size that ``resolve`` has filled."""
    assert value is not None, "resolve() has not run"
    return value


def check_divisible(what: str, size: int, by_what: str, divisor: int) -> None:
    """Refuse a size that does not divide."""
    if divisor < 1 or size % divisor:
        raise UserError(f"{what} {size} is not divisible by {by_what} {divisor}; change one of the two")
