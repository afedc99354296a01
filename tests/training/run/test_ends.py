"""How runs end: by an interval, a signal or an error, with files closed and a trace of --profile written."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import loop
from tests.training.conftest import Drive
from tests.training.helpers import argv, rows


def test_exit_interval_saves_and_stops(drive: Drive) -> None:
    drive(argv(save="out", train_iters=5, exit_interval=2, eval_iters=1))
    assert Path("out/latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert not [r for r in rows(Path("out")) if "lm loss test" in r]


def test_sigterm_saves_and_stops(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    step = loop.train_step

    def step_and_signal(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)

    monkeypatch.setattr(loop, "train_step", step_and_signal)
    try:
        drive(argv(save="out", train_iters=5, exit_signal_handler=True))
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert Path("out/latest_checkpointed_iteration.txt").read_text().strip() == "1"


def test_the_last_iteration_is_the_end_whatever_the_exit_interval(drive: Drive) -> None:
    drive(argv(save="out", train_iters=4, exit_interval=4, eval_iters=1))
    assert [r["iteration"] for r in rows(Path("out")) if "lm loss test" in r] == [4]


PROFILED: dict[str, Any] = {"profile": True, "profile_step_start": 1, "profile_step_end": 3, "lr_decay_iters": 10}


def traces() -> list[str]:
    """Traces of the run in out/, with events; no profiler is left running, which would crash at the process's end."""
    assert not torch.autograd._profiler_enabled()
    found = sorted(Path("out/profile").glob("*.json"))
    assert all(json.loads(path.read_text())["traceEvents"] for path in found)
    return [path.name for path in found]


def test_profile_writes_a_trace(drive: Drive) -> None:
    drive(argv(save="out", train_iters=4, no_save=True, **PROFILED))
    assert traces() == ["rank0.json"]


def test_a_profile_that_ends_early_or_starts_late_writes_what_it_has(
    drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    options = PROFILED | {"profile_step_end": 4, "train_iters": 5}
    drive(argv(save="out", exit_interval=2, **options))
    assert traces() == ["rank0.json"]
    drive(argv(save="out", exit_interval=3, **options))
    assert traces() == ["rank0.json", "rank0_from_2.json"]
    drive(argv(save="out", exit_interval=4, **options))
    assert traces() == ["rank0.json", "rank0_from_2.json", "rank0_from_3.json"]
    assert "--profile: no trace" not in capsys.readouterr().out
    drive(argv(save="out", **options))
    assert len(traces()) == 3
    assert "--profile: no trace, for this start is at iteration 4, and" in capsys.readouterr().out


def test_a_profile_that_never_starts_has_a_note(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="out", train_iters=4, exit_interval=1, **PROFILED))
    assert traces() == []
    assert "--profile: no trace, for this start ended at iteration 1, and" in capsys.readouterr().out


@pytest.mark.parametrize("numbers", [(4, 9), (3, 3), (3, 2), (-1, 2)])
def test_a_profile_of_no_iteration_is_refused(drive: Drive, numbers: tuple[int, int]) -> None:
    options = dict(zip(("profile_step_start", "profile_step_end"), numbers))
    with pytest.raises(UserError, match="profile no iteration of this run, which has 4"):
        drive(argv(save="out", train_iters=4, profile=True, **options))


class BrokenError(Exception):
    """An error in the middle of a run."""


@pytest.mark.parametrize("way", ["error", "signal"])
def test_open_files_and_groups_are_closed_after_every_outcome(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    iterate, logs = loop._train_iteration, list[Any]()

    def ending(run: Any, *rest: Any) -> Any:
        if run.progress.iteration == 2:
            logs.append(run.log)
            if way == "error":
                raise BrokenError
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(run, *rest)

    monkeypatch.setattr(loop, "_train_iteration", ending)
    with pytest.raises(BrokenError) if way == "error" else nullcontext():
        drive(argv(save="out", train_iters=5, **PROFILED | {"profile_step_end": 4}))
    assert traces() == ([] if way == "error" else ["rank0.json"])
    assert logs[0]._metrics.closed
    assert logs[0]._bar is None
