"""Tables of the README, and of the pages it leads to, that follow from the repository."""

from __future__ import annotations

import re

from megatron_lowprec import recipes
from megatron_lowprec.shipped import SHIPPED
from tests.docs.markdown import ROOT, lines_of, prose

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.split(f"# {title}\n", 1)[1].split("\n#", 1)[0]


def test_the_table_of_recipes_names_all() -> None:
    rows = [line.split("|")[2] for line in section("Recipes").splitlines() if line.startswith("|")]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(recipes())


def test_it_is_short() -> None:
    words = [line for line in lines_of(prose(README)) if not line.startswith("|")]
    assert len(" ".join(words).split()) <= 800


def test_every_model_configuration_is_named() -> None:
    named = re.findall(r"`([\w.]+)`", (ROOT / "docs/guide/models.md").read_text(encoding="utf-8"))
    assert {file.stem for file in (SHIPPED / "configs/models").glob("*.yaml")} <= set(named)


def test_every_part_of_the_package_is_in_the_layout() -> None:
    layout = (ROOT / "docs/design/architecture.md").read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
    named = set(re.findall(r"(\w+)(?:/|\.py)", layout))
    package = ROOT / "megatron_lowprec"
    parts = {part.stem for part in package.iterdir() if part.is_dir() or part.suffix == ".py"}
    assert parts - {"__init__", "__pycache__"} <= named
    for name in re.findall(r"^  ([\w/]+/)", layout, re.M):
        assert (package / name).is_dir(), name
