"""What is bound again in Megatron-core: registered, checked against the installed release, and nothing besides."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
from megatron.core import package_info
from megatron.core.transformer import transformer_block

from megatron_lowprec import mcore
from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore import check_release
from megatron_lowprec.mcore.patches import PATCHES, Patch, bind, difference, name_of
from tests.environment import ROOT
from tests.refusal import refused

PACKAGE = ROOT / "megatron_lowprec"


def seen_here(patch: Patch) -> bool:
    first, _, last = patch.seen.partition(" to ")
    series = [tuple(map(int, release.split(".")[:2])) for release in (first, megatron.core.__version__, last or first)]
    return series == sorted(series)


@pytest.mark.parametrize("row", [name for name, patch in PATCHES.items() if seen_here(patch)])
def test_this_release_has_what_is_bound_again(row: str) -> None:
    # names of Megatron-LM are checked where it is, in tests/clients
    targets = [target for target in PATCHES[row].targets if not target.startswith("megatron.training")]
    assert [difference(row, target) for target in targets] == [None] * len(targets)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("megatron.core.fp8_utils:GONE", "has no megatron.core.fp8_utils.GONE"),
        ("megatron.core.gone:name", "has no megatron.core.gone.name"),
        ("megatron.core.fp8_utils:Gone.name()", "has no megatron.core.fp8_utils.Gone.name"),
        (
            "megatron.core.fp8_utils:is_float8tensor(weight)",
            "has other parameters of megatron.core.fp8_utils.is_float8tensor: tensor",
        ),
    ],
)
def test_another_release_ends_in_a_line_that_names_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, target: str, found: str
) -> None:
    monkeypatch.setitem(PATCHES, "example", Patch((target,), "", "", seen="0.16.1"))
    with refused(found, "0.16.1"):
        bind("example", **{name_of(target): None})


def test_a_name_that_megatron_core_no_longer_uses_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "megatron.core.transformer.moe.moe_utils:GONE"
    monkeypatch.setitem(PATCHES, "example", Patch((target,), "", "", unbound=True))
    with pytest.raises(UserError, match=r"does not use megatron\.core\.transformer\.moe\.moe_utils\.GONE"):
        bind("example", GONE=None)


def test_a_name_is_bound_in_modules_and_on_single_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_block, "LayerNormImpl", before := transformer_block.LayerNormImpl)
    bind("final_norm", LayerNormImpl=(norm := object()))
    assert transformer_block.LayerNormImpl is norm is not before
    layer = SimpleNamespace(token_dispatcher=None)
    bind("token_dispatcher", layer, token_dispatcher=1)
    assert layer.token_dispatcher == 1
    with pytest.raises(UserError, match="token_dispatcher"):
        bind("token_dispatcher", object(), token_dispatcher=1)


def assignments(path: Path) -> Iterator[str]:
    """Attributes that a module sets on Megatron's modules and classes, or of registered names on any object."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    theirs: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            theirs |= {a.asname or a.name for a in node.names if (module or a.name).split(".")[0] == "megatron"}
    registered = {name_of(target) for patch in PATCHES.values() for target in patch.targets}
    for node in ast.walk(tree):
        targets: list[Any] = node.targets if isinstance(node, ast.Assign) else []
        for target in [each for item in targets for each in getattr(item, "elts", [item])]:
            if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
                continue
            if target.value.id in theirs or (target.attr in registered and target.value.id != "self"):
                yield f"{path.relative_to(ROOT)}:{node.lineno} sets {target.value.id}.{target.attr}"


def test_nothing_is_bound_again_without_the_register() -> None:
    paths = [*PACKAGE.glob("mcore/**/*.py"), *PACKAGE.glob("training/**/*.py")]
    assert [found for path in sorted(paths) for found in assignments(path)] == []


@pytest.mark.parametrize("release", ["0.15.3", "0.20.0", "1.16.0", "unknown"])
def test_an_unknown_release_is_refused_in_a_line(release: str) -> None:
    with pytest.raises(UserError) as error:
        check_release(release)
    assert f"megatron-core {release} is not supported" in str(error.value)
    assert 'pip install "megatron-core>=0.16,<0.20"' in str(error.value), "pip keeps what a bound of one side allows"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("release", ["0.16.1", "0.17.1", "0.18.2", "0.19.2", "0.19.0rc1", "0.19.3+fa3"])
def test_patch_releases_of_a_supported_one_are_accepted(release: str) -> None:
    check_release(release)


def test_the_release_is_read_without_importing_megatron_core() -> None:
    assert package_info.__version__.startswith(mcore._release())
    assert mcore._release().count(".") == 2


def test_the_installed_release_is_checked_on_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    spec = ModuleSpec("megatron.core", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(megatron.core, "__spec__", spec)
    with pytest.raises(UserError, match=r"megatron-core 0\.20\.0 is not supported"):
        importlib.reload(mcore)


@pytest.mark.parametrize("missing", ["megatron", "megatron.core"])
def test_a_missing_megatron_core_is_named_on_import(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(UserError, match="megatron-core is not installed: pip install"):
        importlib.reload(mcore)
