"""The package's layout: imports go one way, folders and modules stay small, importing costs nothing, configs load."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from megatron_lowprec import get_recipe, recipes
from megatron_lowprec.recipe.parsing import load_recipe, recipe_from_dict, recipe_to_dict
from megatron_lowprec.shipped import SHIPPED
from tests import consumer
from tests.environment import ROOT
from tests.waiting import PATIENCE

PACKAGE = ROOT / "megatron_lowprec"
MAX_MODULES, MAX_LINES = 15, 400
# their folders have modules of the same names
FOLDERS_OF_ONE_KIND = (PACKAGE / "kernels", PACKAGE / "linear" / "backends", PACKAGE / "training" / "models")

# Which parts each part may import. "recipe" is pure data and sees no kernels; kernels see no recipe.
MAY_IMPORT = {
    # the public names; all but errors and recipe are loaded when they are asked for
    "": {"errors", "linear", "mcore", "quantization", "recipe"},
    "__main__": {"commands"},
    "shipped": set(),
    "errors": set(),
    "files": {"errors"},
    "text_tables": set(),
    "formats": set(),
    "scaling": set(),
    "recipe": {"errors", "files", "formats", "linear", "scaling", "shipped"},  # of linear only TABLE
    "report": {
        "errors",
        "files",
        "recipe",
        "shipped",
        "sweep",
        "text_tables",
        "training",
    },  # reads only torch-free modules of training
    "kernels": {"files", "formats", "scaling"},
    "quantization": {"errors", "formats", "kernels", "recipe", "scaling"},
    "three_gemms": {"formats", "kernels", "quantization", "recipe"},
    "optimizer": {"errors", "kernels", "recipe"},
    "comm": {"formats", "kernels", "recipe"},
    "linear": {"errors", "files", "formats", "kernels", "recipe", "quantization", "scaling", "comm"},
    "finetuning": {"errors", "linear", "quantization", "recipe"},
    "torchtitan": {"errors", "linear", "recipe"},
    "mcore": {"errors", "formats", "kernels", "recipe", "quantization", "optimizer", "comm", "linear"},
    "training": {
        *(
            "errors",
            "files",
            "formats",
            "kernels",
            "recipe",
            "quantization",
            "comm",
            "linear",
            "mcore",
            "optimizer",
            "te",
            "shipped",
        ),
    },
    "specs": {"mcore", "recipe"},
    "te": {"errors", "recipe"},
    # reads only torch-free modules of training
    "sweep": {"errors", "files", "recipe", "shipped", "text_tables", "training"},
    "lab": {
        *(
            "conformance",
            "errors",
            "files",
            "formats",
            "kernels",
            "linear",
            "quantization",
            "recipe",
            "report",
            "scaling",
        ),
        *("text_tables", "training"),
    },
    "conformance": {"errors", "files", "formats", "kernels", "quantization", "recipe", "scaling", "shipped"},
    # command lines, each over the parts that it runs
    "commands": {
        "conformance",
        "errors",
        "files",
        "kernels",  # which machine this is
        "lab",
        "linear",
        "quantization",
        "recipe",
        "report",
        "shipped",
        "sweep",
        "text_tables",
        "training",
    },
}
SEES_MEGATRON = {"commands", "mcore", "training"}
# Without torch, so that --list-recipes is instant.
PURE = {
    "",
    "__main__",
    "errors",
    "files",
    "formats",
    "recipe",
    "report",
    "scaling",
    "shipped",
    "specs",
    "sweep",
    "te",
    "text_tables",
}
# The table of backends and each backend's conditions: without torch, and imported by explain.
TABLE = re.compile(r"linear/backends/(table|target|\w+/why_not)\.py")


def part_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, inside functions as well."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            if node.module == "megatron_lowprec":
                yield from (f"megatron_lowprec.{alias.name}" for alias in node.names)


def wrong_imports(path: Path) -> Iterator[str]:
    part, where = part_of(path), path.relative_to(PACKAGE)
    in_table = TABLE.fullmatch(str(where)) is not None
    for name in imported(path):
        top, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if other == "linear" and (part == "recipe" or in_table) and not TABLE.fullmatch(f"{rest.replace('.', '/')}.py"):
            yield f"{where} imports {name}"
        known = top != "megatron_lowprec" or other in MAY_IMPORT["recipe"] | {"recipe"}
        if in_table and (top == "torch" or not known):
            yield f"{where} imports {name}"
        if top == "megatron_lowprec" and rest and other not in (part, *MAY_IMPORT[part]) and other in MAY_IMPORT:
            yield f"{where} imports {name}"
        if (top == "megatron" and part not in SEES_MEGATRON) or (top == "torch" and part in PURE):
            yield f"{where} imports {name}"


MODELS = PACKAGE / "training" / "models"


def wrong_imports_of_models(path: Path) -> Iterator[str]:
    """An architecture's folder knows itself and ``common``; no model knows more of recipes than ``LinearSite``."""
    where = path.relative_to(MODELS)
    others = {folder.name for folder in MODELS.iterdir()} - {where.parts[0], "common"} if len(where.parts) > 1 else ()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            in_package = name.removeprefix("megatron_lowprec.")
            of_recipes = in_package.split(".")[0] == "recipe" and in_package != "recipe.coverage.LinearSite"
            if of_recipes or in_package.startswith(tuple(f"training.models.{other}." for other in others)):
                yield f"{where} imports {name}"


def test_an_architecture_knows_neither_recipes_nor_another_architecture() -> None:
    paths = sorted(MODELS.rglob("*.py"))
    assert {path.parent.name for path in paths} > {"models", "common", "llama", "moe"}
    assert [line for path in paths for line in wrong_imports_of_models(path)] == []


def test_layout() -> None:
    """Imports one way; at most 15 modules a folder and 400 lines a module; no module name twice."""
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 20
    assert {part_of(path) for path in paths} == set(MAY_IMPORT)
    assert [line for path in paths for line in wrong_imports(path)] == []

    modules = [path for path in paths if path.name != "__init__.py"]
    folders = Counter(path.parent for path in modules)
    assert {str(folder): number for folder, number in folders.items() if number > MAX_MODULES} == {}
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {path: number for path, number in lines.items() if number > MAX_LINES} == {}
    names = defaultdict(list)
    for path in modules:
        if path.parent.parent not in FOLDERS_OF_ONE_KIND and path.name != "__main__.py":
            names[path.name].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in names.items() if len(where) > 1} == {}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [
        ("megatron_lowprec.recipe.registry", {"torch", "megatron", "triton", "numpy", "scipy"}),
        ("megatron_lowprec.commands.report_page", {"torch", "megatron", "triton"}),
        # imported before TORCHDYNAMO_DISABLE is set and torch replaced, and losses depend on both
        ("megatron_lowprec.mcore.cpu_compat", {"megatron.core"}),
    ],
)
def test_importing_does_not_load(imported: str, unwanted: set[str]) -> None:
    listed = "megatron_lowprec.recipe.registry.list_table()\n" if imported.endswith("registry") else ""
    code = f"import sys, {imported}\n{listed}print(sorted({unwanted} & sys.modules.keys()))"
    assert run_python(code).strip() == "[]"


@pytest.mark.slow
def test_layers_do_not_print_megatron_s_warnings_about_what_they_replace() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from megatron_lowprec import layer_spec"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_public_names_all_resolve() -> None:
    code = """
import megatron_lowprec
print(sorted(set(megatron_lowprec.__all__) - set(dir(megatron_lowprec))))
print([name for name in megatron_lowprec.__all__ if not getattr(megatron_lowprec, name)])
try:
    megatron_lowprec.nothing
except AttributeError as error:
    print(error)
"""
    assert run_python(code).splitlines() == ["[]", "[]", "module 'megatron_lowprec' has no attribute 'nothing'"]


def test_the_consumer_s_program_runs() -> None:
    """By a name and by a Recipe; `make types` checks its types."""
    mxfp8 = consumer.losses("mxfp8")
    assert mxfp8 == consumer.losses(get_recipe("mxfp8")) == consumer.losses(consumer.mine("mine"))
    assert mxfp8[-1] < mxfp8[0]
    assert 0 < consumer.error_of("mxfp8") < 2**-4  # half a step of E4M3's 3 bits of mantissa, below 1


@pytest.mark.slow
def test_importing_mcore_patches_nothing() -> None:
    """Only cpu_compat.install() may change anything, when it is called."""
    code = """
import torch
import megatron.core.tensor_parallel.layers as layers
before = (torch.Tensor.cuda, torch.Tensor.type, layers.torch, torch.get_default_dtype(), torch.nn.Linear.forward)
import megatron_lowprec.mcore.layers.gpt_spec, megatron_lowprec.mcore.runtime, megatron_lowprec.mcore.cpu_compat
from megatron_lowprec.shipped import SHIPPED
after = (torch.Tensor.cuda, torch.Tensor.type, layers.torch, torch.get_default_dtype(), torch.nn.Linear.forward)
print(all(a is b for a, b in zip(before, after)))
"""
    assert run_python(code).splitlines()[-1] == "True"


@pytest.mark.parametrize(
    "path", sorted(SHIPPED.glob("configs/**/*.yaml")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_config_loads(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert isinstance(yaml.safe_load(text), dict)
    if path.parent.name == "recipes":
        load_recipe(str(path))


def test_there_are_configs() -> None:
    assert {path.stem for path in SHIPPED.glob("configs/models/*.yaml")} >= {"gpt_tiny", "gpt_25m", "gpt_345m"}


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_survives_dump_and_load(name: str) -> None:
    assert recipe_from_dict(yaml.safe_load(yaml.safe_dump(recipe_to_dict(get_recipe(name))))) == get_recipe(name)


def test_imports_have_no_circles_typing_included() -> None:
    names = {
        path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
    }
    imports: dict[str, set[str]] = {}
    for path, name in names.items():
        found = set(imported(path))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        imports[name] = {each.removeprefix("megatron_lowprec.") for each in found} & set(names.values())
    assert sum(map(len, imports.values())) > len(imports)
    TopologicalSorter(imports).prepare()  # CycleError names a circle
