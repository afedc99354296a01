"""Rows of JSON lines as columns, exactly.

Rows with the same keys and types form a table. Whole numbers are int64. Floats are their bytes, one row of a uint8
array a byte, lowest first: four where float32 holds all values of the column, else eight. The noise of low bytes and
the few values of high ones compress better apart. Text is an index into the column's list of texts; null has no array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lowprec.files import Row

Array = npt.NDArray[Any]
Column = str | list[str]
"""A type of a column: ``int``, ``float`` or ``null``, or the list of its texts."""

MOST_VALUES = 2**26
"""Values of a table. Each has seven characters in its row or more, and all rows of an archive at most 2**29."""

_WHOLE = 2**63


@dataclass(frozen=True)
class RowTable:
    """Rows of one file's name with the same keys.

    Attributes:
        file: name in each folder.
        columns: key -> its type.
        rows: folder -> the number of its rows, in the order of the arrays.
        arrays: key -> its column; none for null.
    """

    file: str
    columns: Mapping[str, Column]
    rows: Mapping[str, int]
    arrays: Mapping[str, Array]

    def lines(self) -> Iterator[tuple[str, Iterator[Row]]]:
        """Folder -> its rows.

        Raises:
            ValueError: the arrays are not of these columns and rows, or have more than ``MOST_VALUES``: a column of
                null takes memory here, and none in the file.
        """
        count = sum(map(_natural, self.rows.values()))
        if not self.arrays:
            raise ValueError(f"no column of {self.file} has values")
        if any(array.shape[-1:] != (count,) for array in self.arrays.values()):
            raise ValueError(f"a column has not {count} values")
        if count * len(self.columns) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values in {self.file}")
        columns = {key: _values(kind, self.arrays.get(key), count) for key, kind in self.columns.items()}
        begin = 0
        for folder, rows in self.rows.items():
            yield folder, _rows(columns, begin, begin + rows)
            begin += rows


def row_tables(file: str, rows_of: Mapping[str, Iterable[Row]]) -> list[RowTable]:
    """Tables of the files of one name, by folder. Values are finite or not; lists and objects are no values."""
    found: dict[tuple[tuple[str, str], ...], dict[str, list[Row]]] = {}
    for folder, rows in rows_of.items():
        for row in rows:
            kind = tuple(sorted((key, _type(value)) for key, value in row.items()))
            found.setdefault(kind, {}).setdefault(folder, []).append(row)
    tables = []
    for kind in sorted(found):
        rows = [row for each in found[kind].values() for row in each]
        columns: dict[str, Column] = {}
        arrays: dict[str, Array] = {}
        for key, name in kind:
            columns[key] = name
            values = [row[key] for row in rows]
            if name == "text":
                columns[key] = texts = sorted(set(values))
                number = {text: at for at, text in enumerate(texts)}
                arrays[key] = np.array([number[text] for text in values], np.int64)
            elif name != "null":
                arrays[key] = np.array(values, np.int64) if name == "int" else _bytes(np.array(values, np.float64))
        tables.append(RowTable(file, columns, {folder: len(each) for folder, each in found[kind].items()}, arrays))
    return tables


def _type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "text"
    if type(value) is int and -_WHOLE <= value < _WHOLE:
        return "int"
    if type(value) in (int, float):
        return "float"
    raise TypeError(f"a column of {value!r}")


def _bytes(values: Array) -> Array:
    """Bytes of floats, lowest first: uint8 of (4 or 8, n)."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype("<f4")
    exact = np.array_equal(narrow.astype(np.float64).view(np.int64), values.view(np.int64))
    stored = narrow if exact else values.astype("<f8")
    return np.ascontiguousarray(stored.view(np.uint8).reshape(len(values), stored.itemsize).T)


def _values(kind: Column, array: Array | None, count: int) -> list[Any]:
    """The column's values; ValueError if they are not as ``kind`` says."""
    if kind == "null":
        return [None] * count
    if array is None:
        raise ValueError("a column has no values")
    if kind == "float":
        if array.dtype != np.uint8 or array.ndim != 2 or len(array) not in (4, 8):
            raise ValueError("floats are not 4 or 8 rows of bytes")
        stored = np.ascontiguousarray(array.T).view(f"<f{len(array)}")
        return stored.reshape(count).astype(np.float64).tolist()
    if array.dtype != np.int64 or array.ndim != 1:
        raise ValueError("whole numbers are no row of int64")
    numbers: list[int] = array.tolist()
    if kind == "int":
        return numbers
    if not isinstance(kind, list) or (numbers and not 0 <= min(numbers) <= max(numbers) < len(kind)):
        raise ValueError("text is no index into a list")
    return [kind[number] for number in numbers]


def _rows(columns: Mapping[str, list[Any]], begin: int, end: int) -> Iterator[Row]:
    for at in range(begin, end):
        yield {key: values[at] for key, values in columns.items()}


def _natural(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} rows")
    return number
