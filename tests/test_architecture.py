"""Imports flow one way, importing costs nothing, and what lies in configs/ loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_lowprec import get_recipe, recipes
from megatron_lowprec.recipe.load import load_recipe, recipe_from_dict, recipe_to_dict
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_lowprec"

# Each part may import those before it in its line; "recipe" is pure data and sees no kernels, kernels see no recipe.
MAY_IMPORT = {
    "errors": set(),
    "formats": set(),
    "recipe": {"errors", "formats"},
    "report": {"errors", "recipe"},
    "kernels": {"formats"},
    "quantization": {"errors", "formats", "kernels", "recipe"},
    "optimizer": {"kernels", "recipe"},
    "comm": {"formats", "kernels", "recipe"},
    "operands": {"kernels"},
    "kept_weights": {"kernels", "quantization", "operands"},
    "gemms": {"kernels", "recipe", "quantization"},
    "numerics": {"errors", "formats", "kernels", "recipe", "quantization", "operands", "kept_weights", "gemms"},
    "linear": {"errors", "formats", "kernels", "recipe", "quantization", "operands", "gemms", "numerics"},
    "mcore": {
        *("errors", "formats", "kernels", "recipe", "quantization", "optimizer", "comm"),
        *("operands", "gemms", "numerics"),
    },
    "training": {"errors", "formats", "kernels", "recipe", "quantization", "comm", "numerics", "linear", "mcore"},
    # starts runs in processes of their own, and reads of training/ only what needs neither torch nor megatron
    "sweep": {"errors", "recipe", "training"},
}
# "" is megatron_lowprec/__init__.py, which names things of the recipe for whoever imports the package
MAY_IMPORT[""] = {"errors", "recipe"}
SEES_MEGATRON = {"mcore", "training"}
PURE = {"", "errors", "formats", "recipe", "report", "sweep"}  # no torch: --list-recipes is instant


def part_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, inside functions, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            if node.module == "megatron_lowprec":
                yield from (f"megatron_lowprec.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_flow_one_way(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} has no place in the order of imports: give it one here and in the README"
    for name in imported(path):
        if name.startswith("megatron_lowprec."):
            other = name.split(".")[1]
            if other in MAY_IMPORT or (PACKAGE / other).exists():
                assert other == part or other in MAY_IMPORT[part], f"{path.name} imports {name}"
        if name == "megatron" or name.startswith("megatron."):
            assert part in SEES_MEGATRON, f"{path.name} imports {name}"
        if name == "torch" or name.startswith("torch."):
            assert part not in PURE, f"{path.name} imports {name}"


def test_the_order_covers_the_package() -> None:
    assert {part_of(path) for path in modules()} <= set(MAY_IMPORT)
    assert len(modules()) > 20


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_neither_torch_nor_megatron() -> None:
    code = """
import sys
import megatron_lowprec
from megatron_lowprec.recipe.registry import list_table
list_table()
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "megatron", "triton", "numpy"}))
"""
    assert run_python(code).strip() == "[]"


def test_public_names_all_resolve() -> None:
    code = """
import megatron_lowprec
print([name for name in megatron_lowprec.__all__ if not getattr(megatron_lowprec, name)])
try:
    megatron_lowprec.nothing
except AttributeError as error:
    print(error)
"""
    assert run_python(code).splitlines() == ["[]", "module 'megatron_lowprec' has no attribute 'nothing'"]


def test_importing_mcore_patches_nothing() -> None:
    """Only cpu_stand_in.install() may change anything, when it is called."""
    code = """
import torch
import megatron.core.tensor_parallel.layers as layers
before = (torch.Tensor.cuda, torch.Tensor.type, layers.torch, torch.get_default_dtype(), torch.nn.Linear.forward)
import megatron_lowprec.mcore.spec, megatron_lowprec.mcore.runtime, megatron_lowprec.mcore.cpu_stand_in
after = (torch.Tensor.cuda, torch.Tensor.type, layers.torch, torch.get_default_dtype(), torch.nn.Linear.forward)
print(all(a is b for a, b in zip(before, after)))
"""
    assert run_python(code).splitlines()[-1] == "True"


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_loads(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert isinstance(yaml.safe_load(text), dict)
    if path.parent.name == "recipes":
        load_recipe(str(path))


def test_there_are_configs() -> None:
    assert {path.stem for path in ROOT.glob("configs/models/*.yaml")} >= {"gpt_tiny", "gpt_25m", "gpt_345m"}


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_survives_dump_and_load(name: str) -> None:
    assert recipe_from_dict(yaml.safe_load(yaml.safe_dump(recipe_to_dict(get_recipe(name))))) == get_recipe(name)
