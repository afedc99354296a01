"""Checkpoints in --save of a run that was sent back, or of another run, are not taken for the run's own."""

from __future__ import annotations

import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.training.checkpoint import resume, storage
from megatron_lowprec.training.checkpoint.writer import Origin, publish_own
from tests.training.checkpoint.test_storage import KilledError, killed_at, write
from tests.training.conftest import Drive
from tests.training.helpers import argv, rows

# How a run begins in a folder with checkpoints of iterations 2 and 4 of another, and at which iteration.
STARTS: dict[str, tuple[dict[str, Any], int]] = {
    "sent back": ({"load": "out", "ckpt_step": 2, "lr": 1e-2}, 2),
    "weights of save": ({"load": "out", "finetune": True}, 0),
    "of another folder": ({"load": "base", "ckpt_step": 2, "finetune": True}, 0),
}


@pytest.mark.parametrize("name", STARTS)
def test_without_a_tracker_a_run_goes_on_from_its_own(
    drive: Drive, checkpoints: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    start, begun = STARTS[name]
    for folder in ("base", "out"):
        shutil.copytree(checkpoints, folder)
    command = argv(save="out", recipe="fp8_delayed", train_iters=8, **start, exit_interval=1)
    drive(command)
    assert capsys.readouterr().out.count("does not continue are set aside: out/iter_0000004.1") == 1
    (Path("out") / storage.TRACKER).write_text("")
    drive(command)
    printed = capsys.readouterr().out
    assert f"continuing from out/iter_{begun + 1:07d}" in printed
    assert "set aside" not in printed
    assert [row["iteration"] for row in rows(Path("out"))] == list(range(1, begun + 3))


# Where a run stands that saves iteration 30 beside another's 10 to 40; which stay; from which a next start may go on.
ORIGINS = {
    "continued": (Origin(20, continued=True), {10, 20}, {"of 20"}),
    "weights of a later one": (Origin(40), set(), set()),
    "weights of the same iteration": (Origin(30), set(), {"of 30"}),
    "weights of an earlier one": (Origin(10), set(), {"of 10"}),
    "elsewhere": (Origin(), set(), {"of 30", "of 20", "of 10", ""}),  # the same command does not go on from them
}


@pytest.mark.parametrize("name", ORIGINS)
def test_dying_at_any_change_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No content is lost, and a start goes on from the origin or the new checkpoint, or finds all as it was."""
    origin, stay, origins = ORIGINS[name]
    finished = False
    for call in count(1):
        folder = tmp_path / str(call)
        for iteration in (10, 20, 30, 40):
            write(folder, iteration)
        partial = storage.stage(str(folder), 30)
        (partial / "weights").write_text("new")
        with monkeypatch.context() as patch, suppress(KilledError):
            killed_at(patch, call)
            publish_own(partial, str(folder), 30, origin)
            finished = True
        contents = sorted(path.read_text() for path in folder.glob("*/weights"))
        assert contents == ["new", "of 10", "of 20", "of 30", "of 40"]
        newest = [path for path in resume._candidates(str(folder)).values() if path.exists()]
        found = (newest[0] / "weights").read_text() if newest else ""
        assert found in {"of 40", *origins, "new"}
        if finished:
            assert set(storage.whole(str(folder))) == stay | {30}
            assert found == "new"
            break
    assert call > 3
