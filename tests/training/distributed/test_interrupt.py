"""Interruptions: a signal anywhere saves, asks for another start, and the next start goes on as if nothing had been."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.training import loop, model
from megatron_lowprec.training.data import batches
from megatron_lowprec.training.distributed import interrupt, subprocesses
from megatron_lowprec.training.evaluation import validation
from tests.launch import torchrun
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows
from tests.waiting import PATIENCE, PATIENT_TORCHRUN, ended, wait_for
from tests.weekly import also_weekly

# Dropout is on: a resumed run must restore its random state.
COMMON: dict[str, Any] = {"train_iters": 6, "eval_interval": 2, "eval_iters": 3, "lr_decay_iters": 10}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A run puts back whatever handled its signals before."""
    before = {number: signal.getsignal(number) for number in subprocesses.SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in subprocesses.SIGNALS} == before


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from tests.training.conftest import driving

    folder = tmp_path_factory.mktemp("uninterrupted")
    with driving(folder) as call:
        call(argv(save="out", **COMMON))
    return exact(folder / "out")


def exact(folder: Path) -> list[dict[str, Any]]:
    """What of a run's rows has to be the same bit for bit, evaluations included."""
    return [
        {key: value for key, value in row.items() if "hex" in key or key in ("iteration", "consumed samples")}
        for row in rows(folder)
    ]


def sending(number: signal.Signals, call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, sending this process a signal in its ``call``-th call."""
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return function(*args, **options)

    return wrapped


# Where the signal comes: (module or class, name, in which call), and the iteration that is saved then.
PLACES: dict[str, tuple[Any, str, int, int]] = {
    "step": (loop, "train_step", 3, 3),
    # Two steps, the half of one ahead and a validation have been read by then.
    "data": (batches.MockSamples, "__getitem__", 2 * 4 + 2 + 3 * 4 + 1, 3),
    # After iteration 2 the validation is due; its second of three batches is cut off.
    "evaluation": (validation, "run_microbatches", 2, 2),
    # 2 validations of 3 batches come before the last one, and then the test.
    "last evaluation": (validation, "run_microbatches", 2 * 3 + 2, 6),
    "test": (validation, "run_microbatches", 3 * 3 + 2, 6),
}


@pytest.mark.parametrize("number", subprocesses.SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("place", also_weekly(PLACES, ["step", "evaluation", "test"]))
def test_a_signal_anywhere_saves_and_the_next_start_loses_nothing(
    drive: Drive,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: list[dict[str, Any]],
    place: str,
    number: signal.Signals,
) -> None:
    owner, name, call, iteration = PLACES[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, sending(number, call, getattr(owner, name)))
        drive(argv(save="out", **COMMON))
    assert Path("out/requeue").read_text() == f"{number.name} at iteration {iteration}\n"
    assert Path("out/latest_checkpointed_iteration.txt").read_text() == f"{iteration}\n"
    drive(argv(save="out", **COMMON))
    assert not Path("out/requeue").exists()
    assert exact(Path("out")) == uninterrupted


@pytest.mark.parametrize("function", ["_prepared_texts", "_build_split"])
def test_a_signal_before_the_first_step_ends_a_run_at_once(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str
) -> None:
    text = " ".join(str(i % 127) for i in range(400))
    (tmp_path / "text.jsonl").write_text(f'{{"text": "{text}"}}\n' * 2)
    changes: dict[str, Any] = {"mock_data": None, "train_data_path": ["text.jsonl"], "data_cache_path": "cache"}
    with monkeypatch.context() as patch:
        patch.setattr(batches, function, sending(signal.SIGTERM, 1, getattr(batches, function)))
        with pytest.raises(interrupt.Interrupted, match="SIGTERM"):
            drive(argv(save="out", train_iters=2, **changes))
    assert Path("out/requeue").read_text() == "SIGTERM before the first step\n"
    drive(argv(save="out", train_iters=2, **changes))
    assert len(losses(Path("out"))) == 2
    assert not Path("out/requeue").exists()


def test_a_signal_ends_even_a_start_that_hides_it(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0)
        except interrupt.Interrupted:
            raise RuntimeError("as torch's distributed checkpoint would wrap it") from None

    monkeypatch.setattr(model, "build", build)
    with pytest.raises(interrupt.Interrupted, match="SIGUSR1"):
        drive(argv(save="out"))
    assert Path("out/requeue").exists()


FAILING = """
import os, pathlib, sys
import pretrain_gpt
from megatron_lowprec.training import model
from megatron_lowprec.training.distributed import startup
from tests.waiting import wait_for

def build(*_):
    listens = pathlib.Path("rank 0 listens")
    if os.environ["RANK"] == "1":
        wait_for(listens.exists, "rank 0")
        raise RuntimeError("one rank alone is out of memory")
    listens.touch()
    wait_for(lambda: False, "a signal")

model.build = build
if __name__ == "__main__":
    startup.leave(pretrain_gpt.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_that_fails_before_the_first_step_writes_no_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun then ends the others by the same signal that a preemption does."""
    monkeypatch.setenv(*PATIENT_TORCHRUN)
    (tmp_path / "failing.py").write_text(FAILING)
    ended = torchrun(2, [str(tmp_path / "failing.py"), *argv(save="out")], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1
    assert "one rank alone is out of memory" in ended.stderr
    assert "rank 0: stopped, for another rank has ended" in ended.stderr
    assert not (tmp_path / "out" / "requeue").exists()


def test_a_second_signal_does_no_harm(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    # Slurm signals all processes of a step, and torchrun passes its own on.
    twice = sending(signal.SIGTERM, 2, sending(signal.SIGTERM, 2, loop.train_step))
    monkeypatch.setattr(loop, "train_step", twice)
    drive(argv(save="out", **COMMON))
    assert Path("out/requeue").read_text() == "SIGTERM at iteration 2\n"


def test_a_signal_in_the_last_step_leaves_no_work(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**COMMON, "eval_iters": 0}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", sending(signal.SIGTERM, 6, loop.train_step))
        drive(argv(save="out", **changes))
    assert Path("out/latest_checkpointed_iteration.txt").read_text() == "6\n"
    assert not Path("out/requeue").exists()
    monkeypatch.setattr(loop, "NativeCheck", sending(signal.SIGTERM, 1, loop.NativeCheck))
    drive(argv(save="out", **changes))
    assert not Path("out/requeue").exists(), "nor where nothing is left to train"


def test_without_the_handler_signals_are_left_alone(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        monkeypatch.setattr(loop, "train_step", sending(signal.SIGTERM, 1, loop.train_step))
        drive(argv(save="out", no_exit_signal_handler=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [1]
    assert Path("out/latest_checkpointed_iteration.txt").read_text() == "2\n"


def test_a_time_limit_writes_requeue(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    # Counted from the start of the process, not of the loop: so does a time limit.
    step = loop.train_step

    def slow(*args: Any) -> Any:
        now = time.monotonic()
        monkeypatch.setattr(interrupt.time, "monotonic", lambda: now + 60)
        return step(*args)

    monkeypatch.setattr(loop, "train_step", slow)
    drive(argv(save="out", exit_duration_in_mins=1, **COMMON))
    assert Path("out/requeue").read_text() == "--exit-duration-in-mins 1.0 at iteration 1\n"


def test_a_requested_end_writes_no_requeue(drive: Drive, uninterrupted: list[dict[str, Any]]) -> None:
    for iteration in (2, 4):
        drive(argv(save="out", exit_interval=2, **COMMON))
        assert Path("out/latest_checkpointed_iteration.txt").read_text() == f"{iteration}\n"
        assert not Path("out/requeue").exists()
    drive(argv(save="out", **COMMON))
    assert exact(Path("out")) == uninterrupted


def test_an_old_request_does_not_outlive_a_start_that_fails(drive: Drive) -> None:
    drive(argv(save="out"))
    Path("out/requeue").write_text("SIGTERM at iteration 2\n")
    with pytest.raises(ValueError, match="another model"):
        drive(argv(save="out", hidden_size=128))
    assert not Path("out/requeue").exists()


@pytest.mark.slow
def test_helpers_sit_signals_out() -> None:
    read, write = os.pipe()
    with subprocesses.helpers():
        pid = os.fork()
        if not pid:
            os.read(read, 1)
            os._exit(7)
    for number in subprocesses.SIGNALS:
        os.kill(pid, number)
    os.write(write, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


class SlowLibc:
    """Asks for the signal at a parent's end once the parent has ended."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def prctl(self, *arguments: int) -> None:
        wait_for(lambda: os.getppid() != self.parent, "the end of the parent")
        ctypes.CDLL(None).prctl(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_helpers_end_with_their_process(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        if late:
            monkeypatch.setattr(subprocesses, "_libc", SlowLibc(os.getpid()))
        with subprocesses.helpers():
            helper = os.fork()
            if not helper:
                time.sleep(PATIENCE)
                os._exit(0)
        os.write(write, str(helper).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    started = int(os.read(read, 20))
    wait_for(lambda: ended(started), "the end of the helper")
