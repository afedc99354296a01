"""Who may run a job."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lowprec.sweep.job_record import Lock, holder
from megatron_lowprec.training.distributed import process_lock
from megatron_lowprec.training.distributed.process_start import boot_id, start_ticks

JOB = "gpt_tiny-bf16-s1"


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    process_lock._slurm_knows.cache_clear()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def write(out: Path, processes: dict[str, float], host: str | None = None, job: str | None = None) -> None:
    path = out / "locks" / JOB
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"host": host or socket.gethostname(), "processes": processes, "slurm_job": job, "boot": boot_id()}
    path.write_text(json.dumps(content))


def program(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_taken_until_released(tmp_path: Path) -> None:
    mine = Lock(tmp_path, JOB)
    assert mine.acquire() is None
    other = Lock(tmp_path, JOB).acquire()
    assert other is not None
    assert other.words == f"process {os.getpid()} on {socket.gethostname()}"
    assert Lock(tmp_path, "another").acquire() is None
    mine.release()
    assert Lock(tmp_path, JOB).acquire() is None


@pytest.mark.slow
def test_a_dead_process_holds_nothing(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    write(tmp_path, {str(sleeper.pid): start_ticks(sleeper.pid)})
    assert holder(tmp_path, JOB) is not None
    sleeper.kill()
    assert sleeper.wait() != 0
    assert holder(tmp_path, JOB) is None
    assert Lock(tmp_path, JOB).acquire() is None


@pytest.mark.slow
def test_a_zombie_holds_nothing(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    write(tmp_path, {str(sleeper.pid): start_ticks(sleeper.pid)})
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert holder(tmp_path, JOB) is None


def test_a_number_that_another_process_has_now_holds_nothing(tmp_path: Path) -> None:
    write(tmp_path, {str(os.getpid()): start_ticks(os.getpid()) - 100})
    assert holder(tmp_path, JOB) is None


@pytest.mark.slow
def test_the_job_s_own_process_holds_it_after_its_sweep_is_gone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    mine = Lock(tmp_path, JOB)
    mine.acquire()
    mine.add(sleeper.pid)
    content = json.loads((tmp_path / "locks" / JOB).read_text())
    assert set(content["processes"]) == {str(os.getpid()), str(sleeper.pid)}
    write(tmp_path, {"4194304": 5.0, str(sleeper.pid): start_ticks(sleeper.pid)})
    assert holder(tmp_path, JOB) is not None


def test_a_half_written_file_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / JOB).write_text('{"host": "a')
    assert holder(tmp_path, JOB) is None


def test_on_another_host_nothing_is_known(tmp_path: Path) -> None:
    write(tmp_path, {"1": 1.0}, host="elsewhere")
    assert holder(tmp_path, JOB) is not None


def test_a_requeued_job_takes_its_own_lock_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"1": 1.0}, host="elsewhere", job="12_3")
    assert holder(tmp_path, JOB) is not None
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    assert holder(tmp_path, JOB) is not None
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert Lock(tmp_path, JOB).acquire() is None
    assert json.loads((tmp_path / "locks" / JOB).read_text())["slurm_job"] == "12_3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "lives"),
    [
        ("echo RUNNING", True),
        ("echo PENDING", True),
        ("echo COMPLETED", False),
        ("echo TIMEOUT", False),
        ("true", False),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", True),
    ],
)
def test_slurm_decides_about_the_job_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, lives: bool
) -> None:
    asked = tmp_path / "asked"
    program(tmp_path, "squeue", f'echo "$@" > {asked}; {answer}', monkeypatch)
    write(tmp_path, {"1": 1.0}, host="elsewhere", job="12_3")
    assert (holder(tmp_path, JOB) is not None) == lives
    assert asked.read_text().split()[-2:] == ["--jobs", "12_3"]


def test_a_job_alone_has_its_number() -> None:
    assert process_lock.slurm_job({"SLURM_JOB_ID": "7"}) == "7"
    assert process_lock.slurm_job({}) is None
