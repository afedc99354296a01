"""Numbers and names in the README that follow from the repository."""

from __future__ import annotations

import re

from megatron_lowprec import recipes
from tests.docs.markdown import ROOT, numbers

README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.split(f"# {title}\n", 1)[1].split("\n#", 1)[0]


def test_the_number_of_recipes() -> None:
    assert f"{len(recipes())} recipes, each naming both operands" in README


def test_the_table_of_recipes_names_all() -> None:
    """``mxfp8_e5m2_grad`` and its kin share a row, as "`mxfp8_e5m2_grad`, `_weight`, `_act`"."""
    named: list[str] = []
    for cell in re.findall(r"^\| (`[^|]*`) \|", section("Recipes"), re.M):
        for name in re.findall(r"`(\w+)`", cell):
            named.append(named[-1].rsplit("_", 1)[0] + name if name.startswith("_") else name)
    assert named == list(recipes())


def test_measured_numbers_stand_in_what_their_section_links() -> None:
    found = 0
    for title in ("megatron_lowprec", "Beside other tools", "What runs natively, what is emulated", "Measured"):
        text = section(title)
        sources = [ROOT / link for link in re.findall(r"\]\((docs/results/[^)#]+\.md)", text)]
        known = {number for file in sources for number in numbers(file.read_text(encoding="utf-8"))}
        assert sorted(numbers(text) - known) == [], title
        found += len(numbers(text))
    assert found > 10


def test_every_model_configuration_is_named() -> None:
    row = next(line for line in README.splitlines() if line.startswith("| models |"))
    for file in (ROOT / "configs/models").glob("*.yaml"):
        assert f"`{file.stem.removesuffix('_released')}`" in row, file.name
    assert "`_released`" in row


def test_the_layout_is_that_of_the_repository() -> None:
    tree = section("Layout").split("```text\n")[1].split("```")[0]
    base, named = ROOT, set()
    for line in tree.splitlines():
        names = [name for name in line[:24].split() if name.endswith((".py", "/"))]
        assert names, line
        for name in names:
            path = (base if line.startswith(" ") else ROOT) / name
            assert path.exists(), f"{name} is not there"
            named.add(path)
        base = base if line.startswith(" ") else ROOT / names[0]
    package = ROOT / "megatron_lowprec"
    parts = {part for part in package.iterdir() if part.name not in ("__init__.py", "__pycache__", "errors.py")}
    assert parts <= named, "the layout leaves out a part of the package"
