"""Reads metrics.jsonl, for reports, sweeps and runs that resume. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from megatron_lowprec.files import Row, check_text, json_lines

_MOST_ITERATIONS = 2**53  # exact in floats


def read_metrics(path: Path, say: Callable[[str], None], tail: int | None = None) -> Iterator[Row]:
    """Rows of an iteration or an evaluation by Megatron's keys; arguments and errors as ``json_lines``.

    ``iteration`` is a whole number, other values are numbers, or text under a key that ends in ``hex``.
    """
    return json_lines(path, say, _check, tail)


def check_iteration(row: Row) -> None:
    """Raise ValueError or KeyError for a row without an iteration, or with text that cannot be printed."""
    check_text(row)
    _check_number(row)


def _check_number(row: Row) -> None:
    iteration = row["iteration"]
    if type(iteration) is not int or not 0 <= iteration < _MOST_ITERATIONS:
        raise ValueError(f"iteration is {iteration!r}")


def _check(row: Row) -> None:
    _check_number(row)
    for key, value in row.items():
        if type(value) not in _types(key):
            raise ValueError(f"{key} is {value!r}")
        if type(value) is str:
            check_text(value)


@lru_cache(1024)  # the same keys in each row
def _types(key: str) -> tuple[type, ...]:
    """Types of a column's values; ValueError for a name that cannot be printed."""
    check_text(key)
    return (str,) if key.endswith(" hex") else (int, float)
