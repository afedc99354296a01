"""The lock works anywhere, agrees with pyproject.toml, and the shipped files are the ones their README describes."""

import hashlib
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_lowprec.mcore import SERIES
from megatron_lowprec.shipped import SHIPPED

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK = REPOSITORY / "requirements" / "cpu.txt"


PYTHONS = ("3.11", "3.12", "3.13")


def locked(python: str = PYTHONS[0]) -> dict[str, Requirement]:
    """What the lock installs under a version of Python."""
    lines = (line.split("#")[0].strip() for line in LOCK.read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {
        canonicalize_name(requirement.name): requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
    }


def declared() -> dict[str, list[Requirement]]:
    """What pyproject.toml requires, by extra; the runtime's under the empty name."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in groups.items()}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_locked_line_is_one_exact_public_version(python: str) -> None:
    for name, requirement in locked(python).items():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", name
        assert re.fullmatch(r"[0-9][0-9a-z.]*", specifier.version), f"{name}: a local version or a wildcard"
        assert requirement.url is None, name
        assert requirement.marker is None or name in ("triton", "megatron-core"), name


def test_no_line_names_a_host_a_hash_or_a_cuda_package() -> None:
    text = LOCK.read_text()
    assert "://" not in text
    assert "--" not in text
    assert "+" not in text
    assert not [name for name in locked() if name.startswith(("nvidia-", "cuda-"))]


def test_the_pins_that_cpu_and_gpu_share() -> None:
    pins = {name: str(requirement.specifier) for name, requirement in locked().items()}
    assert pins["torch"] == "==2.13.0"
    assert pins["triton"] == "==3.7.1"  # what that torch's CUDA build asks for


def test_each_python_has_the_newest_release_of_megatron_core_that_it_can_install() -> None:
    found = {python: str(locked(python)["megatron-core"].specifier) for python in PYTHONS}
    assert found == {"3.11": "==0.16.1", "3.12": "==0.19.2", "3.13": "==0.19.2"}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("group", ["", "dev"])
def test_the_lock_holds_what_the_project_requires(group: str, python: str) -> None:
    lock = locked(python)
    for requirement in declared()[group]:
        (pin,) = lock[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version), f"{requirement} but {pin}"


def test_the_range_of_megatron_core_is_the_tested_one() -> None:
    """The workflow runs each minor release of the range; the table of results has these and those outside, and the
    package's own check refuses the same.
    """
    (requirement,) = (each for each in declared()[""] if each.name == "megatron-core")
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "megatron-core.yaml").read_text())
    tested = {Version(row["release"]) for row in workflow["jobs"]["test"]["strategy"]["matrix"]["include"]}
    page = (REPOSITORY / "docs" / "results" / "megatron-core.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \|.*\| (yes|no) \|$", page, re.MULTILINE)
    supported = {Version(release) for release, answer in rows if answer == "yes"}
    others = {Version(release) for release, answer in rows if answer == "no"}
    assert tested == supported
    assert all(requirement.specifier.contains(release) for release in supported)
    assert others
    assert not any(requirement.specifier.contains(release) for release in others)
    minors = {f"{release.major}.{release.minor}" for release in supported}
    assert {bound.version for bound in requirement.specifier} == {
        str(min(supported)),
        f"0.{max(supported).minor + 1}",
    }
    assert minors == set(SERIES)


def test_runtime_and_extras_are_the_published_ones() -> None:
    groups = {name: {requirement.name for requirement in group} for name, group in declared().items()}
    assert groups[""] == {
        *("torch", "megatron-core", "numpy", "scipy", "pyyaml", "psutil"),
        *("tokenizers", "safetensors", "tensorboard", "matplotlib", "rich", "Jinja2"),
    }
    assert set(groups) == {"", "wandb", "datasets", "te", "zstd", "lm-eval", "dev"}


def test_shipped_data_has_the_checksums_of_its_readme() -> None:
    data = SHIPPED / "data"
    lines = re.findall(r"^([0-9a-f]{64})  (\S+)$", (data / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for _, name in lines} == {
        *("enwiki-valid.jsonl.xz", "enwiki-test.jsonl.xz", "wikitext-test.raw.txt.xz", "chat-sample.jsonl"),
        *(f"{folder}/{name}" for folder in ("gpt2", "tiny_bpe") for name in ("vocab.json", "merges.txt")),
    }
    for checksum, name in lines:
        assert hashlib.sha256((data / name).read_bytes()).hexdigest() == checksum, name


@pytest.mark.slow
def test_make_without_a_usable_python_says_what_to_do(tmp_path: Path) -> None:
    command = ["make", "setup", "PYTHON=/nowhere/python3", f"VENV={tmp_path / 'venv'}"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode != 0
    assert "is not Python 3.11, 3.12 or 3.13" in result.stderr
    assert "make PYTHON=/path/to/python3.11" in result.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_make_help_lists_every_target() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    shown = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"make ([\w-]+)", shown) == targets.split()


def test_ci_calls_make_test() -> None:
    script = REPOSITORY / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make test"
