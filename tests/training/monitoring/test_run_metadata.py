"""run.json tells how a run ran, from its first iteration on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.training import loop
from megatron_lowprec.training.monitoring import run_metadata
from tests.training.helpers import argv


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_run_metadata_exists_from_the_start_and_is_complete_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    written = run_metadata.RunRecord(path, True, {"device": "some GPU"}, continues=False)
    started = read(path)
    assert started["device"] == "some GPU"
    assert (started["ended"], started["iteration"], started["peak_memory_bytes"]) == (None, None, None)
    written.end(40, 2**30)
    ended = read(path)
    assert (ended["iteration"], ended["peak_memory_bytes"]) == (40, 2**30)
    assert ended["ended"] >= ended["started"]


@pytest.mark.slow
def test_a_run_that_continues_keeps_the_larger_peak(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for peak, continues, expected in ((5, False, 5), (3, True, 5), (None, True, 5), (7, True, 7), (2, False, 2)):
        run_metadata.RunRecord(path, True, {}, continues=continues).end(1, peak)
        assert read(path)["peak_memory_bytes"] == expected


def test_a_record_has_the_backends_of_each_phase_that_ran(tmp_path: Path) -> None:
    path, first, second = tmp_path / "run.json", {"fprop": "emulated on cpu"}, {"fprop": "not quantized"}
    whole, resumed, other = {"0": first, "1": second}, {"0": first, "1": first}, {"1": first}
    run_metadata.RunRecord(path, True, {"recipe": "a"}, continues=False)
    assert "gemms_of_phases" not in read(path)
    cases = (("a", False, (0, first), {"0": first}), ("a", True, (1, second), whole), ("a", True, (1, first), resumed))
    for recipe, continues, phase, expected in (*cases, ("b", True, (1, first), other)):
        run_metadata.RunRecord(path, True, {"recipe": recipe}, continues=continues).enter_phase(*phase)
        assert read(path)["gemms_of_phases"] == expected


def test_another_rank_writes_nothing(tmp_path: Path) -> None:
    run_metadata.RunRecord(tmp_path / "run.json", False, {}, continues=False).end(1, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_commit_is_marked_if_the_package_has_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    package = tmp_path / "megatron_lowprec"
    monkeypatch.setattr(run_metadata, "SHIPPED", package)
    (package / "a.py").parent.mkdir()
    for name in ("__init__.py", "a.py"):
        (package / name).write_text("1")
    assert run_metadata.commit() is None
    git("init", "-q")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/b.py").write_text("1")
    git("add", "tools")
    git("commit", "-q", "-m", "a package installed in another project's folder")
    assert run_metadata.commit() is None
    git("add", ".")
    git("commit", "-q", "-m", "m")
    head = git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "notes.txt").write_text("beside the package")
    assert run_metadata.commit() == head
    (tmp_path / "tools/b.py").write_text("2")
    assert run_metadata.commit() == head
    assert run_metadata.commit("tools") == f"{head} with changes"
    git("checkout", "-q", "tools")
    (package / "a.py").write_text("2")
    assert run_metadata.commit() == f"{head} with changes"


def test_a_run_records_itself(drive: Callable[[list[str]], None]) -> None:
    drive(argv(save="out", recipe="mxfp4", bf16=True, no_save=True, micro_batch_size=4))
    found = read(Path("out/run.json"))
    assert found["recipe"] == "mxfp4"
    backend = "emulated on cpu (blackwell_mx: no MXFP4 GEMM on cpu)"
    assert found["gemms"] == {"fprop": "not quantized", "dgrad": backend, "wgrad": backend}
    assert found["tokens"] == 2 * 4 * 32
    assert found["parameters"] > 64 * 256
    assert (found["iteration"], found["processes"], found["peak_memory_bytes"]) == (2, 1, None)
    assert found["ended"] is not None
    assert set(found["versions"]) >= {"python", "torch", "megatron-core"}


def test_a_run_that_dies_leaves_its_beginning(
    drive: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(run: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr(loop, "train", die)
    with pytest.raises(RuntimeError):
        drive(argv(save="out", no_save=True))
    found = read(Path("out/run.json"))
    assert (found["recipe"], found["ended"]) == ("bf16", None)
