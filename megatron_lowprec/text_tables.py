"""Text tables: aligned for terminals and logs, or in Markdown."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

Row = Mapping[str, Any]
"""Column key -> value; ``failed`` holds the reason of a row without numbers."""


@dataclass(frozen=True)
class Column:
    """One column: key in a row, heading, and number format."""

    key: str
    heading: str
    form: str = ""

    def text(self, row: Row) -> str:
        """The cell; "-" without a value."""
        value = row.get(self.key)
        return "-" if value is None else format(value, self.form)


def named(*keys: str) -> tuple[Column, ...]:
    """Columns of text under their keys."""
    return tuple(Column(key, key) for key in keys)


def plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] | None = None, *, rule: bool = True
) -> list[str]:
    """Lines of an aligned table.

    Args:
        columns: headings; text after a newline, such as a unit, goes on a second line.
        rows: cells, one for each column.
        left: headings of the left-aligned columns, None for all; others are right-aligned.
        rule: add a line of dashes below the headings.
    """
    heads = list(zip_longest(*(column.split("\n") for column in columns), fillvalue=""))
    widths = [max(map(len, cells)) for cells in zip(*heads, *rows, strict=True)]
    aligned = [
        "  ".join(
            cell.ljust(width) if left is None or column in left else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in (*heads, *rows)
    ]
    dashes = ["  ".join("-" * width for width in widths)] if rule else []
    return [*aligned[: len(heads)], *dashes, *aligned[len(heads) :]]


def markdown_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] | None = None
) -> list[str]:
    """Lines of a Markdown table; ``left`` as in ``plain_table``."""
    rule = ["---" if left is None or column in left else "---:" for column in columns]
    return [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]


def render(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The table: numbers aligned right, text left; a failed row has its reason in place of numbers."""
    texts = [["" if row.get("failed") and c.form else c.text(row) for c in columns] for row in rows]
    lines = plain_table([c.heading for c in columns], texts, [c.heading for c in columns if not c.form])
    # After the heading and its rule.
    for at, row in enumerate(rows, len(lines) - len(rows)):
        if row.get("failed"):
            lines[at] += f"  FAILED: {row['failed']}"
    return "\n".join(lines)
