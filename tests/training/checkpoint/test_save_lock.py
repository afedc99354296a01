"""Two starts on one --save: the second is refused while the first lives, and only then."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_lowprec.commands import export_hf, import_hf
from megatron_lowprec.errors import UserError
from megatron_lowprec.training import loop
from megatron_lowprec.training.checkpoint import storage
from megatron_lowprec.training.checkpoint.save_lock import FILE, SaveLock
from megatron_lowprec.training.distributed import process_lock
from tests.environment import python_path
from tests.launch import forked
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A --save folder whose lock this process has."""
    with SaveLock(tmp_path / "out") as lock:
        lock.acquire()
        yield tmp_path / "out"


def of_another_host(folder: Path, seconds: float, job: str | None = None, **more: Any) -> None:
    """A lock whose holder is not on this host, its last heartbeat so many seconds ago."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"host": "elsewhere", "processes": {"1": 1.0}, "slurm_job": job, "beats": True, **more}
    (folder / FILE).write_text(json.dumps(content))
    moment = time.time() - seconds
    os.utime(folder / FILE, (moment, moment))


def start(folder: Path, processes: int = 1, **changes: Any) -> tuple[list[int | None], str]:
    """Exit codes and output of the driver in processes of its own."""
    return forked(processes, ["pretrain_gpt.py", *argv(**changes)], folder)


def test_a_second_start_leaves_the_first_alone(drive: Drive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step, seen = loop.train_step, list[Path]()

    def recorded(*arguments: Any) -> Any:
        if not seen:
            # What a save of this run is writing to.
            seen.append(storage.stage("out", 7))
            codes, printed = start(tmp_path, save="out", save_interval=1)
            assert codes == [2]
            (line,) = [line for line in printed.splitlines() if "error:" in line]
            holder = f"process {os.getpid()} on {socket.gethostname()}"
            assert line == (
                f"pretrain_gpt.py: error: --save out is held by {holder}: wait for its end, or name another --save"
            )
            assert seen[0].exists()
            for others in ({"save": "other"}, {"save": "out", "no_save": True, "tensorboard_dir": "there/tb"}):
                assert start(tmp_path, **others)[0] == [0]
            assert seen[0].exists()
        return step(*arguments)

    monkeypatch.setattr(loop, "train_step", recorded)
    drive(argv(save="out"))
    assert len(losses(Path("out"))) == 2
    assert not list(tmp_path.rglob(FILE)), "a run that has ended holds nothing"


@pytest.mark.slow
def test_all_ranks_are_refused_in_one_line(held: Path, tmp_path: Path) -> None:
    (held / "requeue").write_text("SIGTERM at iteration 2\n")
    codes, printed = start(tmp_path, processes=2, save="out")
    assert 0 not in codes
    assert printed.count(f"--save out is held by process {os.getpid()} on ") == 1
    assert (held / "requeue").exists(), "it is the holder's"


@pytest.mark.slow
def test_ranks_share_the_lock_of_the_first(tmp_path: Path) -> None:
    for iterations in (1, 2):
        assert start(tmp_path, processes=2, save="out", train_iters=iterations)[0] == [0, 0]


def test_a_run_that_fails_or_is_interrupted_gives_the_lock_back(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            drive(argv(save="out"))
    assert not Path("out", FILE).exists()
    drive(argv(save="out"))


HOLDING = """
import sys, time
from pathlib import Path
from megatron_lowprec.training.checkpoint.save_lock import SaveLock
lock = SaveLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_holder_blocks_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **python_path()}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"is held by process {process.pid} on"):
            SaveLock(tmp_path).acquire()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with SaveLock(tmp_path) as lock:
            lock.acquire()


@pytest.mark.parametrize("job", [None, "812"])
def test_a_holder_elsewhere_lives_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no squeue to ask
    process_lock._slurm_knows.cache_clear()
    of_another_host(tmp_path, 60, job)
    words = r"process 1 on elsewhere.*: wait for its end \(it counts as dead 300 s after its last heartbeat\), or name"
    with pytest.raises(UserError, match=words):
        SaveLock(tmp_path).acquire()
    of_another_host(tmp_path, 2 * process_lock.DEAD_AFTER, job)
    SaveLock(tmp_path).acquire()


@pytest.mark.parametrize(("before", "now"), [({}, None), ({"slurm_restart": "0"}, "1"), ({"slurm_restart": "1"}, "2")])
def test_a_requeued_job_is_not_locked_out_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, str], now: str | None
) -> None:
    of_another_host(tmp_path, 0, "812", **before)  # files of earlier versions do not count the requeues
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    if now is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", now)
    SaveLock(tmp_path).acquire()


@pytest.mark.parametrize("restart", [None, "1"])
def test_another_step_of_this_allocation_lives_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: str | None
) -> None:
    """Two steps of one job on two of its nodes have one job id, and neither is the other before a requeue."""
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    if restart is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    of_another_host(tmp_path, 0, "812", slurm_restart=restart or "0")
    with pytest.raises(UserError, match="is held by process 1 on elsewhere, Slurm job 812"):
        SaveLock(tmp_path).acquire()
    of_another_host(tmp_path, 2 * process_lock.DEAD_AFTER, "812", slurm_restart=restart or "0")
    SaveLock(tmp_path).acquire()


def test_a_step_of_the_clock_kills_no_holder(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The date of the boot is counted back from the clock, and moves with it."""
    boot_time = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + 3600)
    with pytest.raises(UserError, match=f"is held by process {os.getpid()} on"):
        SaveLock(held).acquire()


def test_a_holder_before_a_reboot_is_dead(held: Path) -> None:
    content = json.loads((held / FILE).read_text())
    (held / FILE).write_text(json.dumps({**content, "boot": "another"}))
    SaveLock(held).acquire()


def test_a_running_holder_of_an_earlier_version_is_alive(held: Path) -> None:
    """Its start is a date, which a step of the clock has moved since."""
    (held / FILE).write_text(
        json.dumps({"host": socket.gethostname(), "processes": {str(os.getpid()): 1e9}, "slurm_job": None})
    )
    with pytest.raises(UserError, match=f"is held by process {os.getpid()} on"):
        SaveLock(held).acquire()


HOLDER = {"host": "elsewhere", "processes": {"1": 1.0}, "slurm_job": None}


@pytest.mark.parametrize(
    "content",
    [
        *([], ["host"], "host", 7, None, True, {}, {"host": "elsewhere"}),
        *(HOLDER | {"host": value} for value in (3, None, ["elsewhere"])),
        *(HOLDER | {"processes": value} for value in ([1], None, 5, "1", {"one": 1.0}, {"\0": 1}, {"1": "then"})),
        HOLDER | {"slurm_job": 812},
        HOLDER | {"host": socket.gethostname(), "processes": {"9" * 5000: 1.0}},
    ],
    ids=lambda content: json.dumps(content)[:60],
)
def test_json_that_no_version_writes_holds_nothing(tmp_path: Path, content: Any) -> None:
    (tmp_path / FILE).write_text(json.dumps(content))
    SaveLock(tmp_path).acquire()


def test_a_field_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    of_another_host(tmp_path, 0, a_field_of_tomorrow=True)
    with pytest.raises(UserError, match="is held by process 1 on elsewhere"):
        SaveLock(tmp_path).acquire()


def test_another_container_of_this_host_lives_by_its_heartbeat(tmp_path: Path) -> None:
    """Its processes have numbers of their own, which say nothing here."""
    of_another_host(tmp_path, 0)
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, "host": socket.gethostname(), "namespace": "pid:[1]"}))
    with pytest.raises(UserError, match="is held by process 1 on"):
        SaveLock(tmp_path).acquire()


def wait_for(path: Path, moment: float) -> None:
    """Until a file has been touched since."""
    end = time.monotonic() + 60
    while path.stat().st_mtime <= moment:
        assert time.monotonic() < end, "no heartbeat came"
        time.sleep(0.01)


def test_a_holder_keeps_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_lock, "BEAT", 0.01)
    with SaveLock(tmp_path) as lock:
        lock.acquire()
        for _ in range(2):
            os.utime(tmp_path / FILE, (1, 1))
            wait_for(tmp_path / FILE, 1)


def test_a_holder_that_was_given_up_leaves_its_follower_alone(tmp_path: Path) -> None:
    with SaveLock(tmp_path) as lock:
        lock.acquire()
        of_another_host(tmp_path, 0)
    assert (tmp_path / FILE).exists()


def test_the_lock_goes_where_a_new_run_of_the_default_folder_goes(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = loop.train_step, list[list[str]]()

    def recorded(*arguments: Any) -> Any:
        seen.append([str(path.parent) for path in Path("runs").rglob(FILE)])
        return step(*arguments)

    monkeypatch.setattr(loop, "train_step", recorded)
    for _ in range(2):
        drive(argv(train_iters=1))
    assert Path("runs/gpt-bf16.1").is_dir()
    assert seen == [["runs/gpt-bf16/checkpoints"]] * 2


def test_an_import_takes_the_lock_as_well(drive: Drive, held: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(save="run", train_iters=1))
    assert export_hf.main(["--load", "run", "--out", "hf"]) == 0
    staged = storage.stage(str(held), 7)
    assert import_hf.main(["--load", "hf", "--save", str(held)]) == 2
    assert f"is held by process {os.getpid()} on" in capsys.readouterr().err
    assert staged.exists()


def test_a_lock_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    for ask in (SaveLock(tmp_path).acquire, SaveLock(tmp_path).other):
        with pytest.raises(UserError, match=r"its run\.lock cannot be read or written: Is a directory; name another"):
            ask()
