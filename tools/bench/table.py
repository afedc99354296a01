"""Rows as a plain text table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def render(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The table: numbers aligned right, text left; a failed row has its reason in place of numbers."""
    texts = [[column.text(row) for column in columns] for row in rows]
    widths = [max([len(c.heading), *(len(line[i]) for line in texts)]) for i, c in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if column.form else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    lines = [line([column.heading for column in columns]), "  ".join("-" * width for width in widths)]
    for row, cells in zip(rows, texts, strict=True):
        if row.get("failed"):
            named = [cell if not column.form else "" for cell, column in zip(cells, columns, strict=True)]
            lines.append(f"{line(named)}  FAILED: {row['failed']}")
        else:
            lines.append(line(cells))
    return "\n".join(lines)
