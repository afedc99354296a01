"""Tables as lines of text: aligned for a terminal or a log, or in Markdown."""

from collections.abc import Collection, Sequence
from itertools import zip_longest


def plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] | None = None, *, rule: bool = True
) -> list[str]:
    """Aligned lines.

    Args:
        columns: headings; the part after a newline, such as a unit, stands below.
        rows: a text for each column.
        left: headings of the columns aligned to the left, the others to the right; None for all.
        rule: a line of dashes below the headings.
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
