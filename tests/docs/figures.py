"""Figures that a page quotes, each tied to the cell of the results page that it comes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.docs.markdown import ROOT, prose

RESULTS = ROOT / "docs/results"
_NUMBER = r"[−+-]?\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True)
class Figure:
    """A figure of a page and its cells.

    ``text`` is of the quoting page, with {} in the place of the figure. A row is named by cells that only it has, or by
    the first one of the header; a blank first cell takes the one above. ``combine`` makes one number of several rows'
    or of one cell's numbers.
    """

    text: str
    page: str
    heading: str  # under which the table is
    column: str
    rows: tuple[tuple[str, ...], ...]
    combine: Callable[[Sequence[float]], float] = lambda values: values[0]


def quoted(page: Path, figure: Figure) -> str:
    """The figure as the page prints it, without sign or unit."""
    before, after = (re.escape(part) for part in figure.text.split("{}"))
    found = re.findall(f"{before}({_NUMBER}){after}", prose(page))
    assert len(found) == 1, f"{page.name}: {figure.text!r} stands there {len(found)} times"
    return str(found[0])


def source(figure: Figure) -> float:
    """The number that the cells hold."""
    return figure.combine([number for row in figure.rows for number in _numbers(cell(figure, row))])


def cell(figure: Figure, row: tuple[str, ...]) -> str:
    """The one cell of the column in the rows with all of these cells."""
    found = [
        cells[header.index(figure.column)]
        for header, rows in _tables(RESULTS / figure.page, figure.heading)
        if figure.column in header
        for cells in rows
        if {*row} <= {header[0], *cells}
    ]
    assert len(found) == 1, f"{figure.page}, {figure.heading}: {len(found)} cells of {row} in {figure.column!r}"
    return found[0]


def same(quoted_text: str, value: float) -> bool:
    """Whether a value rounds to the figure, in as many digits as that has."""
    number = float(quoted_text.replace("−", "-").replace(",", ""))
    decimals = len(quoted_text.partition(".")[2])
    return abs(number - value) <= 0.5000001 * 10**-decimals


def _numbers(text: str) -> list[float]:
    return [float(number.replace("−", "-").replace(",", "")) for number in re.findall(_NUMBER, text)]


def _tables(page: Path, heading: str) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of each table of a section; cells without ticks."""
    section = re.split(r"^#+ (.*)\n", prose(page), flags=re.M)
    (text,) = (body for title, body in zip(section[1::2], section[2::2], strict=True) if title == heading)
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        header, _, *rows = (
            [each.strip().replace("`", "") for each in line[1:].rstrip("|\n").split("|")] for line in block.splitlines()
        )
        for above, row in pairwise(rows):
            row[0] = row[0] or above[0]
        tables.append((header, rows))
    return tables
