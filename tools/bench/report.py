"""Output of a run: progress, notes and tables on the terminal, and everything as JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lowprec.text_tables import Column, Row, render
from tools.bench.machine import header_lines


def spread_columns(digits: int = 4) -> tuple[Column, ...]:
    """Median, percentiles and noise of a ``Timing``."""
    form = f".{digits}f"
    ms = Column("ms", "ms", form)
    return ms, Column("low", "p20", form), Column("high", "p80", form), Column("noise", "rounds", ".1%")


class Report:
    """Prints the tables of one run and collects them for the JSON file.

    Args:
        header: of ``machine.header``.
        arguments: of the command line.
    """

    def __init__(self, header: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.content: dict[str, Any] = {"header": header, "arguments": arguments, "notes": [], "tables": []}

    def progress(self, line: str) -> None:
        """Print a line on stderr."""
        print(line, file=sys.stderr, flush=True)

    def note(self, *lines: str) -> None:
        """Print conditions and footnotes above the next table."""
        self.content["notes"] += lines
        print(*lines, sep="\n", flush=True)

    def table(self, title: str, rows: Sequence[Row], columns: Sequence[Column], **more: Any) -> None:
        """Print a table under the run's header; ``more`` goes into the JSON file."""
        self.put(title, rows, **more)
        print(*header_lines(self.content["header"]), "", title, render(rows, columns), "", sep="\n", flush=True)

    def put(self, title: str, rows: Sequence[Row], **more: Any) -> None:
        """Set the table of this title in the JSON file, such as the rows measured so far."""
        others = [table for table in self.content["tables"] if table["title"] != title]
        self.content["tables"] = [*others, {"title": title, "rows": list(rows), **more}]

    @property
    def failed(self) -> bool:
        """Whether any row has no number."""
        return any(row.get("failed") for table in self.content["tables"] for row in table["rows"])

    def write(self, path: Path) -> None:
        """Write everything as one JSON object."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
