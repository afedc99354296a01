"""What the pages say of recipes is what the registry holds, and their examples run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import typing
from pathlib import Path

import pytest
import torch
import yaml

from megatron_lowprec import UserError, get_recipe, recipes
from megatron_lowprec.formats import ELEMENT_FORMATS
from megatron_lowprec.recipe import registry
from megatron_lowprec.recipe.activation_spec import ActivationSpec
from megatron_lowprec.recipe.coverage import LinearSite, check_sizes
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.quant_spec import ScaleSpec, TensorScaleSpec
from megatron_lowprec.recipe.recipe import GradientSpec, KeepBf16, OptimizerSpec, Recipe
from megatron_lowprec.recipe.schema import GemmSpec, HadamardSpec, QuantSpec
from megatron_lowprec.scaling import CODED_SCALE_FORMATS, SCALE_FORMATS, SCALE_RULES
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.sweep import spec as sweep
from tests.docs.markdown import PAGES, ROOT, Fence, fences, name_of, numbers, prose
from tests.environment import PLACE_IN_LAUNCH
from tools import doc_tables
from tools.tables import of_recipes
from tools.tables.pages import named_recipes, page_of, pages, tables_of

FAMILIES = sorted(page for page in (ROOT / "docs/recipes").glob("*.md") if page.stem not in ("README", "custom"))
NUMERICS = ROOT / "docs/design/numerics.md"


# ---- generated tables
@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_tables_equal_the_registry(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == doc_tables.rewritten(page), "run python tools/doc_tables.py"


@pytest.mark.parametrize("name", named_recipes())
def test_every_recipe_has_a_page(name: str) -> None:
    found = page_of(name)
    assert found or name == "bf16", f"{name} is on no page of docs/recipes: give it a table operands or differences"
    assert len({page for page in found if page.stem != "custom"}) <= 1, f"{name} is on {found}"
    for page in found:
        assert f"`{name}`" in prose(page) or name in page.read_text(encoding="utf-8").splitlines()[0]


def test_every_page_names_recipes_that_run_somewhere() -> None:
    for page in FAMILIES:
        tables = tables_of(page.read_text(encoding="utf-8"))
        assert {"operands", "execution"} <= {kind for kind, *_ in tables}, name_of(page)
        described, executed = (
            {name for kind, *names in tables if kind in kinds for name in names if name in recipes()}
            for kinds in (("operands", "differences"), ("execution",))
        )
        assert described <= executed, f"{name_of(page)}: no execution of {described - executed}"


def test_a_changed_recipe_changes_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/recipes/mxfp8.md"
    changed = load_recipe("mxfp8", ["dgrad.grad_output.scale_rule=ceil", "name=mxfp8"])
    monkeypatch.setitem(registry._RECIPES, "mxfp8", changed)
    assert doc_tables.rewritten(page) != page.read_text(encoding="utf-8")


def test_a_table_of_a_bench(tmp_path: Path) -> None:
    rows = [
        {"variant": "bf16", "ms": 2.0, "noise": 0.06, "over_bf16": 1.0},
        {"variant": "mxfp8, compiled", "ms": 3.04, "noise": 0.05, "over_bf16": 1.52},
        {"variant": "fp8, compiled", "failed": "out of memory"},
    ]
    (tmp_path / "a.json").write_text(json.dumps({"tables": [{"rows": rows}]}))
    page, text = tmp_path / "a.md", "<!-- table: bench a.json {}variant mode ms over_bf16 -->\n<!-- end of table -->\n"
    page.write_text(text.format(""))
    head, _, plain, compiled = doc_tables.rewritten(page).splitlines()[1:-1]
    assert head == "|  |  | ms | over bf16 |"
    assert plain == "| bf16 | eager | 2.0 (rounds 6% apart) | 1.000 |"
    assert compiled == "| mxfp8 | compiled | 3.0 | 1.520 |"
    page.write_text(text.format("variant=*compiled "))
    assert doc_tables.rewritten(page).splitlines()[3:-1] == [compiled]


def test_a_table_of_an_operand_shows_every_field() -> None:
    """A field that is added to the schema has to be shown, or two recipes that differ look alike."""
    names = {field.name for field in dataclasses.fields(QuantSpec)} - {"scale"}
    names |= {f"scale.{field.name}" for field in dataclasses.fields(ScaleSpec)}
    plain = QuantSpec("e4m3", "tensor")
    nvfp4 = QuantSpec("e2m1", "1x16", "e4m3", "product")
    others = {
        "format": "e5m2",
        "scale.granularity": "row",
        "scale.format": "e8m0",
        "scale.rule": "amax_pow2",
        "scale.rounding": "stochastic",
        "scale.amax_floor": 1e-4,
        "scale.block_target": 4.0,
        "scale.four_over_six": "mae",
        "scale.zero_code": "one",
        "tensor_scale": TensorScaleSpec(2688.0),
        "correction": "eden",
        "source": "fprop",
        "rounding": "stochastic",
        "random_bits": 4,
        "headroom": 0.5,
        "scaling": "delayed",
        "history": 4,
        "history_rule": "most_recent",
        "history_update": "microbatch",
        "margin": 2,
    }
    assert set(others) == names
    for name, value in others.items():
        changes: dict[str, object] = {name: value}
        levels = ("scale.rounding", "scale.block_target", "scale.four_over_six", "scale.zero_code", "tensor_scale")
        before = nvfp4 if name in levels else plain
        if name == "correction":
            before = dataclasses.replace(nvfp4, scale=dataclasses.replace(nvfp4.scale, zero_code="one"))
        if name == "scale.format":
            before, changes = (
                dataclasses.replace(plain, granularity="1x32"),
                {"scale": ScaleSpec("1x32", value, "floor")},
            )
        elif name.startswith("scale."):
            changes = {"scale": dataclasses.replace(before.scale, **{name.removeprefix("scale."): value})}
        if name == "random_bits":
            before = dataclasses.replace(plain, rounding="stochastic")
        if name in ("history", "history_rule", "history_update", "margin"):
            before = dataclasses.replace(plain, scaling="delayed")
        after = dataclasses.replace(before, **changes)  # type: ignore[arg-type]
        assert of_recipes._numerics(before) != of_recipes._numerics(after), name


# ---- docs/recipes/custom.md
def table_after(page: Path, heading: str) -> dict[str, list[str]]:
    """First column, without its ticks, to the other ones, of the first table after a heading."""
    text = page.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert rows is not None
    cells = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in rows[0].splitlines()[2:]]
    return {row[0].strip("| `"): [cell.strip("| ") for cell in row[1:]] for row in cells}


def test_fields_of_an_operand() -> None:
    table = table_after(ROOT / "docs/recipes/custom.md", "Fields of an operand")
    parts = {"scale": ScaleSpec, "tensor_scale": TensorScaleSpec}
    fields, hints = {}, {}
    for outer in dataclasses.fields(QuantSpec):
        spec, prefix = (parts[outer.name], f"{outer.name}.") if outer.name in parts else (QuantSpec, "")
        inner = dataclasses.fields(spec) if prefix else [outer]
        fields |= {prefix + field.name: field for field in inner}
        hints |= {prefix + field.name: typing.get_type_hints(spec)[field.name] for field in inner}
    assert list(table) == list(fields)
    assert table.pop("tensor_scale.target")[1] == "none"  # required where there is a tensor scale
    for name, (values, default, *_) in table.items():
        value = fields[name].default
        wanted = "required" if value is dataclasses.MISSING else "null" if value is None else str(value)
        assert default == wanted, name
        if typing.get_origin(hints[name]) is typing.Literal:
            assert values.split(", ") == list(typing.get_args(hints[name])), name
    assert table["format"][0].split(", ") == list(ELEMENT_FORMATS)
    assert table["scale.format"][0].split(", ") == list(SCALE_FORMATS)
    assert sorted(table["scale.rule"][0].split(", ")) == sorted(SCALE_RULES)


def test_fields_of_a_gemm_and_of_the_whole() -> None:
    table = table_after(ROOT / "docs/recipes/custom.md", "Fields of a GEMM and of the recipe")
    wanted = {f"hadamard.{field.name}": field.default for field in dataclasses.fields(HadamardSpec)}
    wanted |= {"fast_accumulation": GemmSpec().fast_accumulation}
    for part, spec in (
        ("keep_bf16", KeepBf16),
        ("optimizer", OptimizerSpec),
        ("gradients", GradientSpec),
        ("activations", ActivationSpec),
    ):
        wanted |= {f"{part}.{field.name}": field.default for field in dataclasses.fields(spec)}
    wanted["fp8_weights"] = Recipe("any", "").fp8_weights
    shown = {name: "none" if value == () else str(value).lower() for name, value in wanted.items()}
    assert {name: row[1] for name, row in table.items()} == shown


def test_rules_of_scales_are_all_named_in_the_rules() -> None:
    text = NUMERICS.read_text(encoding="utf-8")
    for rule in ("amax_pow2", "half_away", "random_bits"):
        assert f"`{rule}`" in text
    formulas = re.findall(r"^ +(fp32|e8m0|coded) +(\w+) ", ScaleSpec.__doc__ or "", re.M)
    kinds = {**dict.fromkeys(CODED_SCALE_FORMATS, "coded"), "fp32": "fp32", "e8m0": "e8m0"}
    rules = {(kinds[name], row.name) for row in SCALE_RULES.values() for name in row.scale_formats}
    assert sorted(formulas) == sorted(rules)


# ---- measured and published numbers
@pytest.mark.parametrize("page", FAMILIES, ids=name_of)
def test_measured_numbers_stand_in_what_the_page_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8").split("## Measured\n", 1)[1].split("\n## ", 1)[0]
    sources = [page.parent / link for link in re.findall(r"\]\(([^)#]+\.md)", text)]
    assert sources
    known = {
        n for file in [*sources, SHIPPED / "configs/claims.yaml"] for n in numbers(file.read_text(encoding="utf-8"))
    }
    # Differences that the pages take of the table of 50 steps.
    known |= {0.010, 0.003} if any("recipes-125m" in file.name for file in sources) else set()
    assert len(numbers(text)) > 3
    assert sorted(numbers(text) - known) == []


# ---- examples
YAML_EXAMPLES = [fence for page in PAGES for fence in fences(page) if fence.language == "yaml"]
_OPTIONAL = {"accelerate", "peft", "torchtitan"}  # extras of pyproject.toml that the lock has not
PYTHON_PAGES = [page for page in PAGES if any(fence.language == "python" for fence in fences(page))]


def first_line(fence: Fence) -> str:
    return f"{name_of(fence.page)}: {fence.body.splitlines()[0][:60]}"


@pytest.mark.parametrize("fence", YAML_EXAMPLES, ids=first_line)
def test_yaml_examples_are_recipes_or_sweeps(fence: Fence, tmp_path: Path) -> None:
    file = tmp_path / "my_recipe.yaml"
    file.write_text(fence.body, encoding="utf-8")
    content = yaml.safe_load(fence.body)
    assert isinstance(content, dict)
    if "recipes" not in content:
        load_recipe(str(file))
    for size in content.get("sizes", [None]) if "recipes" in content else ():
        sweep.read(str(file), size)


def test_every_sweep_that_is_shipped_is_in_the_table() -> None:
    page = ROOT / "docs/guide/sweeps.md"
    named = [*table_after(page, "Shipped sweeps"), *table_after(page, "Studies")]
    assert sorted(named) == sorted(set(named))
    assert set(named) == {file.stem for file in (SHIPPED / "configs/sweeps").glob("*.yaml")}


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_python_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The blocks of a page one after the other, as a reader would type them."""
    blocks = [fence.body for fence in fences(page) if fence.language == "python"]
    if any("transformer_engine" in block for block in blocks) and not _transformer_engine_runs():
        pytest.skip("TransformerEngine or a GPU is missing")
    monkeypatch.setattr(registry, "_RECIPES", dict(registry._RECIPES))
    monkeypatch.chdir(tmp_path)
    for name in PLACE_IN_LAUNCH:  # other tests leave them
        monkeypatch.delenv(name, raising=False)
    names: dict[str, object] = {}
    left_out = set()
    for block in blocks:
        missing = {name for name in _OPTIONAL & _imported(block) if importlib.util.find_spec(name) is None}
        left_out |= missing
        if not missing:
            exec(compile(block, f"{name_of(page)}, python", "exec"), names)
    if left_out:
        pytest.skip(f"the blocks that import {', '.join(sorted(left_out))}, which make test-optional installs")


def _imported(block: str) -> set[str]:
    """Packages that a block imports, and accelerate, which Hugging Face's Trainer needs."""
    found = set(re.findall(r"^(?:import|from) (\w+)", block, re.M))
    return found | {"accelerate"} if "Trainer" in block else found


def _transformer_engine_runs() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def test_every_page_is_linked_from_another() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for page in (ROOT / "docs").rglob("*.md"):
        name = f"{page.parent.name}/{page.name}" if page.name == "README.md" else page.name
        assert any(name in text for other, text in texts.items() if other != page), name_of(page)


# ---- sizes that recipes take, in docs/guide/troubleshooting.md
SIZES = re.findall(
    r"^\| (`[^|]+) \| ([^|]+) \| ([^|]+) \| any \|$",
    (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8"),
    re.M,
)


def test_sizes_that_recipes_take() -> None:
    known = {name: (into, out) for names, into, out in SIZES for name in re.findall(r"`(\w+)`", names)}
    assert len(known) >= 10
    for name, wanted in known.items():
        recipe = get_recipe(name)
        for index, text in enumerate(wanted):
            multiple = 1 if text.startswith("any") else int(re.findall(r"\d+", text)[-1])
            for size, taken in ((768 + multiple, True), (768 + multiple // 2, multiple == 1)):
                sizes = [768, 768]
                sizes[index] = size
                site = LinearSite(1, "linear", *sizes, "column")
                try:
                    check_sizes(recipe, [site], 1, 1)
                except UserError:
                    assert not taken, f"{name} refuses {sizes}"
                else:
                    assert taken, f"{name} takes {sizes}"
