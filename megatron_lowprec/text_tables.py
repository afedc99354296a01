"""Text tables: aligned for terminals and logs, or in Markdown."""

from collections.abc import Collection, Sequence
from itertools import zip_longest


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
