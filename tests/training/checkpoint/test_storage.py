"""Checkpoint folders: whole or not there, whenever the process dies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.training.checkpoint import storage


def write(folder: Path, iteration: int, content: str = "") -> Path:
    partial = storage.stage(str(folder), iteration)
    (partial / "weights").write_text(content or f"of {iteration}")
    return storage.publish(partial, str(folder), iteration)


def test_a_checkpoint_appears_with_its_name_and_tracker(tmp_path: Path) -> None:
    assert storage.whole(str(tmp_path)) == {}
    assert storage.tracked(str(tmp_path)) is None
    for iteration in (20, 100):
        assert write(tmp_path, iteration) == tmp_path / f"iter_{iteration:07d}"
        assert storage.tracked(str(tmp_path)) == iteration
    assert list(storage.whole(str(tmp_path))) == [100, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000020",
        "iter_0000100",
        "latest_checkpointed_iteration.txt",
    ]


class KilledError(Exception):
    pass


def killed_at(monkeypatch: pytest.MonkeyPatch, call: int) -> Callable[[], int]:
    """From the ``call``-th change of names on, nothing happens any more; the number of changes there were."""
    made = 0

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made >= call:
                raise KilledError
            return change(*args, **options)

        return changed

    for owner, name in ((Path, "rename"), (storage.os, "replace"), (storage.shutil, "rmtree")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    return lambda: made


@pytest.mark.parametrize("again", [False, True], ids=["the next iteration", "the same iteration"])
def test_dying_at_any_change_of_names_leaves_a_checkpoint_to_continue_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """--save of 20 after 10, or of 10 once more, keeping one: each change of names is the last one that happens."""
    survived = 0
    for call in range(1, 20):
        folder = tmp_path / str(call)
        write(folder, 10, "old")
        with monkeypatch.context() as patch:
            made = killed_at(patch, call)
            try:
                write(folder, 10 if again else 20, "new")
                storage.prune(str(folder), 10 if again else 20, keep=1)
                finished = True
            except KilledError:
                finished = False
        latest, whole = storage.tracked(str(folder)), storage.whole(str(folder))
        assert latest in whole
        assert (whole[latest] / "weights").read_text() in ("old", "new")
        if finished:
            assert made() == call - 1
            assert (whole[latest] / "weights").read_text() == "new"
            break
        survived += 1
        # The next save finds its way over what was left.
        write(folder, 30)
        assert storage.tracked(str(folder)) == 30
        assert not list(folder.glob("*.partial.*"))
    assert survived >= 3


def test_remains_are_removed_and_a_new_place_has_a_new_name(tmp_path: Path) -> None:
    first = storage.stage(str(tmp_path), 10)
    (first / "shard").write_text("")
    second = storage.stage(str(tmp_path), 10)
    assert not first.exists()
    assert second != first
    assert storage.whole(str(tmp_path)) == {}


def test_the_newest_are_kept_up_to_this_iteration(tmp_path: Path) -> None:
    for iteration in (10, 20, 30, 40):
        write(tmp_path, iteration)
    # A run that went back to 20 saves 30 anew: 40 is yet to be replaced.
    removed = storage.prune(str(tmp_path), 30, keep=2)
    assert [path.name for path in removed] == ["iter_0000010"]
    assert list(storage.whole(str(tmp_path))) == [40, 30, 20]


@pytest.mark.parametrize(
    ("text", "iteration"),
    [("20\n", 20), ("", None), ("release", None), ("-3", None), ("2 0", None), ("\x00\xff", None)],
)
def test_the_tracker_holds_a_number_or_nothing(tmp_path: Path, text: str, iteration: int | None) -> None:
    (tmp_path / storage.TRACKER).write_bytes(text.encode("latin-1"))
    assert storage.tracked(str(tmp_path)) == iteration


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("iter_10", "iter_0000010.partial.ab", "iter_000001x", "iteration_0000010"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000020").write_text("")
    assert storage.whole(str(tmp_path)) == {}
    (tmp_path / "iter_0000030.old").mkdir()
    assert storage.whole(str(tmp_path)) == {30: tmp_path / "iter_0000030.old"}
    shutil.copytree(tmp_path / "iter_0000030.old", tmp_path / "iter_0000030")
    assert storage.whole(str(tmp_path)) == {30: tmp_path / "iter_0000030"}
