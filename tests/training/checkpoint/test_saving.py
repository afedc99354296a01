"""What a run writes: the newest checkpoints, those of asynchronous saves, none that a full disk cuts short."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.training import loop
from megatron_lowprec.training.checkpoint import storage, writer
from tests.refusal import refused
from tests.training.checkpoint.conftest import COMMON
from tests.training.conftest import Drive
from tests.training.helpers import argv, largest_file, losses


def test_only_the_last_are_kept(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(**COMMON, keep_last=2))
    assert list(storage.whole("out")) == [6, 4]
    assert "saved out/iter_0000006, removed 1 older" in capsys.readouterr().out


@pytest.mark.parametrize(
    "layout", [{}, {"use_distributed_optimizer": True, "bf16": True}], ids=["plain", "distributed"]
)
def test_an_asynchronous_save_has_the_state_of_its_request(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    common = COMMON | layout | {"recipe": "fp8_delayed"}
    drive(argv(**common | {"save": "sync"}))
    with monkeypatch.context() as patch:
        # Published as late as can be: weights and moments have changed by then.
        patch.setattr(writer.CheckpointWriter, "poll", lambda self: None)
        drive(argv(**common | {"save": "out", "async_save": True}))
    assert losses(Path("out")) == losses(Path("sync"))
    for iteration in (2, 4):
        rest = f"rest{iteration}"
        shutil.copytree(storage.iteration_folder("out", iteration), storage.iteration_folder(rest, iteration))
        (Path(rest) / storage.TRACKER).write_text(f"{iteration}\n")
        drive(argv(**common | {"save": rest}))
        assert losses(Path(rest)) == losses(Path("sync"))[iteration:]
    assert "saved out/iter_0000006" in capsys.readouterr().out


def test_training_goes_on_while_a_checkpoint_is_written(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[tuple[int, int | None]] = []
    step = loop.train_step

    def watching(*args: Any) -> Any:
        published.append((args[3], storage.tracked("out")))
        return step(*args)

    polls = iter([False, False, False, True, True, True])
    poll = writer.CheckpointWriter.poll
    monkeypatch.setattr(writer.CheckpointWriter, "poll", lambda self: poll(self) if next(polls) else None)
    monkeypatch.setattr(loop, "train_step", watching)
    drive(argv(**COMMON | {"save_interval": 1, "train_iters": 3}, async_save=True))
    # Steps completed, and the checkpoint that a start would have found: the one before is finished before the next.
    assert published == [(0, None), (1, None), (2, 1)]
    assert storage.tracked("out") == 3


@pytest.mark.parametrize("size", [300_000, 1_000], ids=["shards", "all files"])
@pytest.mark.parametrize("asynchronously", [False, True], ids=["sync", "async"])
def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, whole: Path, size: int, asynchronously: bool
) -> None:
    save = writer.CheckpointWriter.save

    def full(self: Any, trainer: Any, progress: Any) -> None:
        self.finish()  # of the checkpoint before
        with largest_file(size if progress.iteration == 4 else resource.RLIM_INFINITY):
            save(self, trainer, progress)

    options = COMMON | {"async_save": asynchronously or None}
    with monkeypatch.context() as patch:
        patch.setattr(writer.CheckpointWriter, "save", full)
        with refused(match=r"could not be written: .*its disk has [0-9,]+ MiB free; iteration 2 stays the newest"):
            drive(argv(**options))
    assert not list(Path("out").glob("*.partial.*")), "it takes the room that the next attempt needs"
    drive(argv(**options))
    assert losses(Path("out")) == losses(whole)
