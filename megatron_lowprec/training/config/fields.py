"""Checks that several parts make of options."""

from __future__ import annotations

from megatron_lowprec.errors import UserError


def check_divisible(what: str, size: int, by_what: str, divisor: int) -> None:
    """Raise a UserError unless ``divisor`` divides ``size``."""
    if divisor < 1 or size % divisor:
        raise UserError(f"{what} {size} is not divisible by {by_what} {divisor}; change one of the two")
