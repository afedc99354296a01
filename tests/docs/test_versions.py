"""Versions that several files name agree with pyproject.toml."""

import re
import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.docs.markdown import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDS = {need.name.lower(): need.specifier for need in map(Requirement, PROJECT["dependencies"])}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_image_has_a_torch_that_the_package_takes() -> None:
    """The tag of PyTorch's images begins with the version of their torch; other images name none."""
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text("Dockerfile"), re.M)
    image, _, tag = base.partition(":")
    assert image == "pytorch/pytorch"
    assert tag.partition("-")[0] in NEEDS["torch"]


def test_the_supported_pythons_are_the_same_everywhere() -> None:
    taken = SpecifierSet(PROJECT["requires-python"])
    supported = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}.99" in taken]
    (oldest,) = [bound.version for bound in taken if bound.operator == ">="]
    assert re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])) == supported
    others = f"{', '.join(supported[1:-1])} or {supported[-1]}"
    listed = f"{supported[0]} (from {oldest} on), {others}"
    assert f"Python {listed} is enough" in text("README.md")
    assert f"Python {listed}, and make" in text("docs/guide/quickstart.md")
    assert f"is not Python {supported[0]} from {oldest} on, {others} with venv" in text("Makefile")
    workflow = yaml.safe_load(text(".github/workflows/megatron-core.yaml"))
    assert {row["python"] for row in workflow["jobs"]["test"]["strategy"]["matrix"]["include"]} == set(supported)
    first, last = oldest.replace(".", ", "), int(supported[-1].partition(".")[2]) + 1
    assert f"({first}) <= sys.version_info[:3] < (3, {last})" in text("Makefile")
