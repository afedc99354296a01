"""The lock works anywhere, agrees with pyproject.toml, and the shipped files are the ones their README describes."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import megatron_lowprec
from megatron_lowprec.mcore import SERIES
from megatron_lowprec.shipped import SHIPPED

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK = REPOSITORY / "requirements" / "cpu.txt"


PYTHONS = ("3.11", "3.12", "3.13")


def locked(python: str = PYTHONS[0]) -> dict[str, Requirement]:
    """What the lock installs under a version of Python."""
    text = LOCK.read_text() + LOCK.with_name("torch.txt").read_text()
    requirements = [Requirement(line) for line in re.findall(r"^([A-Za-z][^\\\n]*?) *\\?$", text, re.MULTILINE)]
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


def test_every_file_but_torch_s_has_a_hash() -> None:
    blocks = re.split(r"\n(?=[A-Za-z])", re.sub("#.*", "", LOCK.read_text()).strip())
    assert {name for name in locked() if name != "torch"} <= {canonicalize_name(b.partition("==")[0]) for b in blocks}
    for block in blocks:
        assert re.fullmatch(r"\S+==[^\\\n]+( \\\n    --hash=sha256:[0-9a-f]{64})+", block), block.partition("\n")[0]


def test_no_line_names_a_host_or_a_cuda_package() -> None:
    text = re.sub("#.*", "", LOCK.read_text() + LOCK.with_name("torch.txt").read_text())
    assert "://" not in text
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
@pytest.mark.parametrize("group", ["", "train", "lab", "dev"])
def test_the_lock_holds_what_the_project_requires(group: str, python: str) -> None:
    lock = locked(python)
    for requirement in declared()[group]:
        if requirement.name == "megatron-lowprec":  # another group of this project
            continue
        (pin,) = lock[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version), f"{requirement} but {pin}"


def test_the_range_of_megatron_core_is_the_tested_one() -> None:
    """The workflow runs each minor release of the range; the table of results has these and those outside, and the
    package's own check refuses the same.
    """
    (requirement,) = (each for each in declared()["train"] if each.name == "megatron-core")
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
    assert groups[""] == {"torch", "numpy", "pyyaml"}
    assert groups["train"] == {"megatron-core", "psutil", "tokenizers", "safetensors", "tensorboard", "rich"}
    assert groups["lab"] == {"megatron-lowprec", "scipy", "Jinja2", "matplotlib"}
    others = {"wandb", "datasets", "sentencepiece", "te", "zstd", "lm-eval", "peft", "torchtitan", "dev"}
    assert set(groups) == {"", "train", "lab"} | others


_TRIES_A_WHEEL = """
import contextlib, io, sys
import megatron_lowprec
assert not {name.split(".")[0] for name in sys.modules} & {"torch", "scipy", "megatron"}, "import loads a library"
from megatron_lowprec.commands.main import run
for command in (
    ["recipes", "mxfp8_bf16_ends", "--config", "gpt_345m"],
    ["sweep", "paper_table2", "--size", "small", "--seeds", "7", "--set", "train-data-path=data/enwiki-valid.jsonl.xz",
     "--slurm-dry-run"],
    ["train", "--recipe", "mxfp4_rht_sr", "--mock-data", "--train-iters", "1", "--eval-iters", "0", "--explain-recipe"],
):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run(command) == 0, command
    print(len(said.getvalue()) > 500, *(word for word in said.getvalue().split() if word.endswith("requeue.sh")))
print(megatron_lowprec.__file__, megatron_lowprec.__version__)
"""


@pytest.mark.slow
def test_the_sdist_gives_a_wheel_that_works_away_from_the_repository(tmp_path: Path) -> None:
    """sdist, wheel of it, installed into a folder: all files of the package are there, and commands find them."""

    def python(*arguments: str, cwd: Path, path: str = "") -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    source, out = tmp_path / "source", tmp_path / "out"
    ignored = shutil.ignore_patterns("__pycache__", "cache")
    shutil.copytree(REPOSITORY / "megatron_lowprec", source / "megatron_lowprec", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"
    python("-c", build, "sdist", str(out), cwd=source)
    (sdist,) = out.glob("megatron_lowprec-*.tar.gz")
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    python("-c", build, "wheel", str(out), cwd=next((tmp_path / "unpacked").iterdir()))
    (wheel,) = out.glob("*.whl")
    target = tmp_path / "target"
    python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=out)
    shipped, installed = source / "megatron_lowprec", target / "megatron_lowprec"
    files = {file.relative_to(shipped) for file in shipped.rglob("*") if file.is_file()}
    assert len(files) > 300
    assert files - {file.relative_to(installed) for file in installed.rglob("*")} == set()
    assert (target / "bin/megatron-lowprec").exists()
    # the other releases of Megatron-core that CI tests come by this variable
    others = [path for path in sys.path if Path(path, "megatron").is_dir()]
    path = os.pathsep.join([str(target), *others])
    *commands, last = python("-c", _TRIES_A_WHEEL, cwd=out, path=path).splitlines()
    requeue = installed / "sweep/requeue.sh"
    assert commands == ["True", f"True {requeue}", "True"]
    assert last == f"{installed / '__init__.py'} {megatron_lowprec.__version__}"


def test_the_version_is_in_one_place() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "megatron_lowprec.__version__"}
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert "version" not in citation


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
def test_make_without_a_usable_python_has_an_error(tmp_path: Path) -> None:
    command = ["make", "setup", "PYTHON=/nowhere/python3", f"VENV={tmp_path / 'venv'}"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode != 0
    assert "is not Python 3.11 from 3.11.4 on, 3.12 or 3.13" in result.stderr
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
