"""Pages stay short: their words, outside of what programs write."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.markdown import PAGES, ROOT, name_of

LIMIT = 54_500
# Between the markers of tools/doc_tables.py, or of a tool whose test compares its output; and output of commands.
_WRITTEN = re.compile(r"<!-- (?:table|printed): .*?<!-- end of table -->|^```text\n.*?^```$", re.M | re.S)
_BY_TOOLS = {"docs/results/fuzz.md", "docs/results/fault-injection.md"}  # whole pages, by --out
COUNTED = [page for page in PAGES if page.is_relative_to(ROOT / "docs") or page.parent == ROOT]


def words(text: str) -> int:
    """What has a letter or a digit, between spaces: prose, tables written by hand, commands and code."""
    return sum(re.search(r"\w", word) is not None for word in _WRITTEN.sub("", text).split())


def test_words_of_all_pages() -> None:
    counts = {name_of(page): words(page.read_text(encoding="utf-8")) for page in COUNTED}
    total = sum(count for name, count in counts.items() if name not in _BY_TOOLS)
    longest = sorted(counts.items(), key=lambda each: -each[1])[:10]
    assert total <= LIMIT, f"{total} words, {LIMIT} at most: say it once; the longest are {longest}"


def test_pages_that_tools_write_name_the_tool() -> None:
    for name in _BY_TOOLS:
        assert re.search(r"^`python -m tools\.\w+ .*--out " + name, (ROOT / name).read_text(encoding="utf-8"), re.M)


def test_words_are_counted_outside_of_what_programs_write() -> None:
    page = (
        "Two words | - |\n<!-- table: operands mxfp8 -->\n| a | b |\n<!-- end of table -->\n"
        "```text\nan output\n```\n```\nmake test\n```\n<!-- printed: tools/x.py -->\n| c |\n<!-- end of table -->\n"
    )
    assert words(page) == words("Two words\n```\nmake test\n```\n") == 4


def test_the_page_of_a_limit_is_found() -> None:
    assert {name_of(page) for page in COUNTED} >= {"README.md", "CONTRIBUTING.md", "docs/guide/report.md"}
    assert all(Path(ROOT / name) in COUNTED for name in _BY_TOOLS)
