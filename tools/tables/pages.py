"""The pages of docs/, the tables in them, and the data beside them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lowprec.recipe.registry import recipes
from megatron_lowprec.shipped import names_in

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
TABLE = re.compile(r"(?P<begin><!-- table: (?P<what>[^>]*?) -->\n)(?P<table>.*?)(?P<end><!-- end of table -->)", re.S)
Row = Sequence[str]


def pages() -> list[Path]:
    """The pages that may contain tables."""
    return sorted(DOCS.rglob("*.md"))


def tables_of(text: str) -> list[list[str]]:
    """Kind and arguments of each table of a page."""
    return [match["what"].split() for match in TABLE.finditer(text)]


def named_recipes() -> list[str]:
    """Registered names, then the YAML files."""
    return [*recipes(), *(f"configs/recipes/{name}.yaml" for name in names_in("configs/recipes"))]


def page_of(name: str) -> list[Path]:
    """The pages whose tables describe a recipe."""
    described = ("operands", "differences")
    return [
        page
        for page in pages()
        if any(what[0] in described and name in what[1:] for what in tables_of(page.read_text(encoding="utf-8")))
    ]


def data_of(page: Path, name: str) -> Any:
    """The content of a JSON file beside a page."""
    return json.loads((page.parent / name).read_text(encoding="utf-8"))
