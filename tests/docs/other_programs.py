"""What the pages' commands may give to programs that are not this project's drivers or tools."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from packaging.requirements import Requirement

from megatron_lowprec.te.translation import INSTALL
from tests.docs.markdown import ELLIPSES, ROOT
from tests.tools.test_packaging import declared

# What the reader puts in.
PLACEHOLDER = re.compile(r"[A-Z_]+(\.yaml)?|\$.*|FILLED_IN.*|.*….*")
SLURM = {
    *("--nodes", "--gpus-per-node", "--cpus-per-task", "--time", "--job-name", "--signal", "--output", "--batch"),
    *("--partition", "--account", "--qos", "--requeue", "--kill-on-bad-exit", "--nodelist", "--wrap"),
}


def plain(words: Sequence[str]) -> list[str]:
    """Without what stands for "and the rest of it"; an ellipsis behind a flag is that flag's value."""
    before = ["", *words]
    return [w for w, last in zip(words, before) if w not in ELLIPSES or last.startswith("--")]


def check_slurm(words: Sequence[str]) -> list[str]:
    """The script's own words, after options of sbatch that are known here."""
    rest = plain(words)
    while rest and rest[0].startswith("--"):
        option = rest.pop(0)
        assert option.partition("=")[0] in SLURM, f"{option}: an option of Slurm that no test knows"
        if "=" not in option:
            rest.pop(0)
    return rest


def check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.M)[0].split())
    variables = set(re.findall(r"^(\w+) \??:?=", makefile, re.M))
    for word in words:
        name, equals, _ = word.partition("=")
        assert name in (variables if equals else targets), f"make {word}: the Makefile has no {name}"


def check_pip(words: Sequence[str], line: str) -> None:
    assert words[0] == "install", words
    for word in words[1:]:
        if word.startswith("-") or word == ".":
            continue
        requirement = Requirement(re.sub(r"^\.(?=\[)", "megatron-lowprec", word))  # of this folder
        if requirement.name.replace("_", "-") == "megatron-lowprec":
            assert requirement.extras <= set(declared()), f"pyproject.toml has no extra of {word}"
        elif requirement.name == "transformer-engine":
            assert word in INSTALL
        else:
            raise AssertionError(f"{line}: no test knows where {word} comes from")


def check_pytest(words: Sequence[str]) -> None:
    """Folders and files with tests, of the mark that is asked for."""
    marks, paths = pytest_words(words)
    for path in paths:
        name, _, test = path.partition("::")
        files = [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("test_*.py"))
        texts = [file.read_text(encoding="utf-8") for file in files]
        assert texts, f"{name} has no tests"
        assert not test or f"def {test.split('::')[-1].partition('[')[0]}(" in texts[0], f"{name} has no {test}"
        assert all(any(re.search(rf"\b{mark}\b", text) for text in texts) for mark in marks), f"{name}: none of {marks}"


def pytest_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Marks, which pyproject.toml declares, and paths."""
    parser = argparse.ArgumentParser(prog="pytest")
    parser.add_argument("-m", dest="marks", default="")
    parser.add_argument("-n", dest="workers")
    parser.add_argument("-q", "-v", "--collect-only", action="store_true")
    parser.add_argument("-r", "-rs", dest="report", action="store_true")
    parser.add_argument("paths", nargs="*")
    given = parser.parse_args(list(words))
    declared_marks = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    marks = re.findall(r"\w+", given.marks)
    assert set(marks) <= {*declared_marks, "not", "and", "or"}, f"-m {given.marks}: pyproject.toml has {declared_marks}"
    return [mark for mark in marks if mark in declared_marks and "not" not in marks], given.paths


def check_measure(words: Sequence[str]) -> None:
    """Names of parts, from the script's own comment."""
    text = (ROOT / "scripts/measure.sh").read_text(encoding="utf-8")
    parts = re.findall(r"^#   ([a-z]+)  ", text, re.M)
    unknown = [word for word in plain(words[1:]) if word not in parts and word not in ("PART...", "--")]
    assert not unknown, f"scripts/measure.sh has no {unknown}, but {parts}"


def check_study(words: Sequence[str]) -> None:
    """An action, and lanes that exist; a word in capitals is the reader's."""
    assert words[0] in ("start", "wait", "pack"), words
    for lane in words[3:] if words[0] == "start" else ():
        assert PLACEHOLDER.fullmatch(lane.removeprefix("scripts/studies/")) or (ROOT / lane).is_file(), f"no {lane}"


def check_lm_eval(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="lm_eval")
    for name in ("--model", "--model_args", "--include_path", "--tasks"):
        parser.add_argument(name, required=True)
    for name in ("--batch_size", "--metadata", "--output_path", "--device"):
        parser.add_argument(name)
    given = parser.parse_args(list(words))
    assert (ROOT / given.include_path / f"{given.tasks}.yaml").is_file(), f"{given.include_path} has no {given.tasks}"
