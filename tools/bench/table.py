"""Rows of a measurement as a plain text table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lowprec.text_tables import plain_table

Row = Mapping[str, Any]
"""Column key -> value; ``failed`` holds the reason where there is no number to print."""


@dataclass(frozen=True)
class Column:
    """One column: key of the row, its heading, and how a number is written."""

    key: str
    heading: str
    form: str = ""

    def text(self, row: Row) -> str:
        """The cell; "-" for what was not measured."""
        value = row.get(self.key)
        return "-" if value is None else format(value, self.form)


def render(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The table: numbers to the right, text to the left, a failed row's reason in place of its numbers."""
    texts = [["" if row.get("failed") and c.form else c.text(row) for c in columns] for row in rows]
    left = [column.heading for column in columns if not column.form]
    head, rule, *lines = plain_table([column.heading for column in columns], texts, left)
    told = [
        f"{line}  FAILED: {row['failed']}" if row.get("failed") else line for line, row in zip(lines, rows, strict=True)
    ]
    return "\n".join([head, rule, *told])
