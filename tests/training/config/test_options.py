"""Options are declared once: every reader follows the declaration, and nothing else lists their names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lowprec.training.config.options import GROUPS, OPTIONS, Config, options_in
from megatron_lowprec.training.options.declaration import Part
from tests.environment import ROOT

PACKAGE = ROOT / "megatron_lowprec"
# Conversions name options beside the names of another project.
TRANSLATIONS = ("training/convert/", "hugging_face.py", "llama_like.py")
TABLE = 4  # names in one display; fewer are a condition


def test_an_option_is_declared_in_one_place(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("declared_worker.py")
    done = subprocess.run([sys.executable, worker], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_every_option_has_a_part_and_names_options() -> None:
    for name, option in OPTIONS.items():
        assert option.part is not None, name
        needs = [need.lstrip("!").partition("=")[0] for need in f"{option.needs} {option.read_with}".split()]
        others = [other for need in needs for other in need.split("|")]
        assert set(others) <= OPTIONS.keys() - {name}, name
    assert sum(len(options_in(*Part, groups=(group,))) for group in (*GROUPS, Config)) == len(OPTIONS)

    page = (ROOT / "docs/guide/options.md").read_text(encoding="utf-8")
    assert [group.__name__ for group in GROUPS if f"<!-- table: options {group.__name__} -->" not in page] == []


def _names(node: ast.AST) -> list[str]:
    """Strings of a display: elements, keys, or the words of a text; none of a dict with values of the run."""
    found: Sequence[object] = ()
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        found = [item.value for item in node.elts if isinstance(item, ast.Constant)]
    elif isinstance(node, ast.Dict):
        if not all(isinstance(value, (ast.Constant, ast.Tuple)) for value in node.values):
            return []
        found = [key.value for key in node.keys if isinstance(key, ast.Constant)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = node.value.split()
    return [name for name in found if isinstance(name, str)]


def _tables() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(PACKAGE))
        if any(part in place for part in TRANSLATIONS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = _names(node)
            if len(names) >= TABLE and len(OPTIONS.keys() & set(names)) > len(names) // 2:
                yield f"{place}:{getattr(node, 'lineno', 0)}: {', '.join(names)}"


def test_no_table_of_option_names_is_outside_of_the_declarations() -> None:
    assert list(_tables()) == []


def _reads_of_one_group() -> Iterator[str]:
    """Functions with a ``config: Config`` of which they read one group of options, and pass it on to none."""
    groups = {name: group.__name__ for group in GROUPS for name in options_in(*Part, groups=(group,))}
    for path in sorted(PACKAGE.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            whole = [
                arg.arg for arg in function.args.args if arg.annotation and ast.unparse(arg.annotation) == "Config"
            ]
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id in whole]
            reads = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.value in names]
            read = {groups.get(node.attr, "") for node in reads}
            if len(reads) == len(names) and len(read) == 1 and "" not in read:
                yield f"{path.relative_to(PACKAGE)}: {function.name} reads {', '.join(read)}"


def test_a_function_takes_the_part_that_it_reads() -> None:
    assert list(_reads_of_one_group()) == []
