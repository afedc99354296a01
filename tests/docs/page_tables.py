"""Reads generated tables of result pages, without the code that writes them."""

from __future__ import annotations

import pytest

from tests.docs.archived_columns import RESULTS


def table(page: str, marker: str) -> list[dict[str, str]]:
    """Rows of the page's table that ``tools/doc_tables.py`` writes under this marker."""
    text = (RESULTS / page).read_text(encoding="utf-8").partition(f"<!-- table: {marker} -->\n")[2]
    head, _, *body = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.partition("<!-- end of table -->")[0].splitlines()
    )
    return [dict(zip(head, row, strict=True)) for row in body]


def shown(cell: str) -> float:
    """Number of a cell with a minus sign of its own."""
    return float(cell.replace("\N{MINUS SIGN}", "-"))


def within(value: float, decimals: int) -> object:
    """What rounds to a cell of so many decimals."""
    return pytest.approx(value, abs=0.5 * 10**-decimals + 1e-9)
