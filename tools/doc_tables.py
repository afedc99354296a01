"""Generate the tables of docs/ that are derived from recipes or from files of results, between their markers.

    python tools/doc_tables.py            # update the pages
    python tools/doc_tables.py --check    # list the pages that would change; exit code 1 if there are any

A table is between ``<!-- table: KIND ARGUMENTS -->`` and ``<!-- end of table -->``; ``--help`` lists the
kinds.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_lowprec.errors import Parser
from megatron_lowprec.text_tables import markdown_table
from tools.tables import of_measurements, of_plans, of_recipes, of_runs
from tools.tables.pages import REPOSITORY, TABLE, Row, pages

_MODULES = of_recipes, of_plans, of_runs, of_measurements
_TABLES = {kind: rows for module in _MODULES for kind, rows in module.TABLES.items()}


def rewritten(page: Path) -> str:
    """The page's text with up-to-date tables."""
    text = page.read_text(encoding="utf-8")

    def table(match: re.Match[str]) -> str:
        kind, *names = match["what"].split()
        return match["begin"] + _markdown([*_TABLES[kind](page, *names)]) + match["end"]

    return TABLE.sub(table, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code."""
    parser = Parser(description="\n".join(str(module.__doc__) for module in (sys.modules[__name__], *_MODULES)))
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page would change")
    args = parser.parse_args(argv)
    stale = [page for page in pages() if page.read_text(encoding="utf-8") != rewritten(page)]
    for page in stale:
        print(("out of date: " if args.check else "wrote ") + str(page.relative_to(REPOSITORY)))
        if not args.check:
            page.write_text(rewritten(page), encoding="utf-8")
    return int(args.check and bool(stale))


def _markdown(rows: Sequence[Row]) -> str:
    head, *body = rows
    return "".join(f"{line}\n" for line in markdown_table(head, body))


if __name__ == "__main__":
    sys.exit(main())
