"""scripts/measure.sh: every command of it is one that the programs take."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.command_checks import check
from tests.docs.markdown import Command
from tools.bench import __main__ as bench

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/measure.sh"
PARTS = (
    "tests",
    *("step", "graphs", "muon", "options"),
    *("linear", "fourbit", "rehearsal"),
    *("experts", "convert"),
    *("memory", "peaks", "activations"),
    "configs",
    "large",
    "scaling",
    *("llama", "gathers", "snapshot"),
    "layouts",
    *("schedule", "recipes", "ladder", "rates", "variants", "operands", "medium"),
    "lm",
    "clients",
    "megatron",
    "interrupt",
)


def measure(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env={**os.environ, **more}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_commands(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = measure("--dry-run", str(tmp_path), part, GPUS="2", DATA="my_corpus_text_document")
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert commands
    for words in commands:
        check(Command(SCRIPT, tuple(words), fenced=True), monkeypatch)
        if words[:3] == ["python", "-m", "tools.bench"]:
            bench.check(bench.build_parser().parse_args(words[3:]))


def test_flags_of_sweeps_reach_each_sweep(tmp_path: Path) -> None:
    flags = "--seeds 1238-1241 --only *mxfp8*"
    done = measure("--dry-run", str(tmp_path), "recipes", GPUS="1", DATA="my_corpus_text_document", SWEEP=flags)
    sweeps = [words for line in done.stdout.splitlines() if "scripts/sweep.py" in (words := shlex.split(line))]
    assert [words[-4:] for words in sweeps] == [flags.split()] * 2


def test_peaks_of_saved_activations_are_compared_without_cuda_graphs(tmp_path: Path) -> None:
    """Not every variant can be captured, and graphs hold memory."""
    done = measure("--dry-run", str(tmp_path), "activations", GPUS="1", DATA="my_corpus_text_document")
    assert done.stdout.count("'--cuda-graph-impl' 'none'") == len(done.stdout.splitlines()) == 12


@pytest.mark.parametrize("part", ["speed", "run"])  # run is a function of the script, but no part
def test_unknown_parts_are_refused(tmp_path: Path, part: str) -> None:
    done = measure("--dry-run", str(tmp_path), part, GPUS="0")
    assert done.returncode == 2
    assert done.stderr == f"scripts/measure.sh: {part} is none of: {' '.join(PARTS)}\n"


def path_of_python(folder: Path, noted: str, ends: str = "") -> str:
    """A PATH whose python adds a line to ``calls`` in ``folder``, and ends as a shell command does."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/bash\necho "{noted}" >> {folder}/calls\n{ends}\n')
    (programs / "python").chmod(0o755)
    return f"{programs}:{os.environ['PATH']}"


@pytest.mark.slow
def test_a_part_that_is_done_is_not_repeated_and_one_that_failed_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {"PATH": path_of_python(tmp_path, "$*", "[[ $* != *scaling* ]]"), "GPUS": "1"}
    for _ in range(2):
        assert measure(str(out), "muon", "scaling", **environment).returncode == 1
    calls = (tmp_path / "calls").read_text()
    assert (calls.count("tools.bench step"), calls.count("tools.bench scaling")) == (1, 2)
    assert (out / "muon.done").exists()
    assert not (out / "scaling.done").exists()


@pytest.mark.slow
def test_a_part_that_was_stopped_repeats_no_step_that_is_done(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {"PATH": path_of_python(tmp_path, "$*", f"[[ $* != *345m* || -e {tmp_path}/on ]]"), "GPUS": "1"}
    assert measure(str(out), "step", **environment).returncode == 1
    (tmp_path / "on").touch()
    assert measure(str(out), "step", **environment).returncode == 0
    calls = (tmp_path / "calls").read_text()
    assert (calls.count("--shapes 1.3b"), calls.count("--shapes 345m")) == (1, 2)


@pytest.mark.slow
def test_groups_run_side_by_side_on_a_gpu_each(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = path_of_python(tmp_path, "$CUDA_VISIBLE_DEVICES $5 $*")
    done = measure(str(out), "muon", "snapshot", "--", "fourbit", PATH=path, GPUS="2")
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sorted(line.split(" ")[0] for line in calls) == ["0", "0", "1", "1", "1", "1"]
    assert {path.name for path in out.iterdir()} == {"0", "1"}
    assert (out / "0/snapshot.done").exists()
    assert (out / "1/fourbit.done").exists()
