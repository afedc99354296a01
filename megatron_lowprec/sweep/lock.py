"""One process at a time runs a cell: a file that names it, and recognises it as gone.

The file names the sweep's process and the cell's own, which outlives a sweep that was killed: while either lives, the
cell is taken. On another host nothing is known of a process; there its Slurm job is asked for, if it had one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import psutil

from megatron_lowprec.sweep.files import write_whole

FOLDER = "locks"
_ASK_EVERY = 30  # seconds between questions to Slurm about a job; tables are drawn more often


@dataclass(frozen=True)
class Holder:
    """Who runs a cell. Processes by number and start (seconds since the epoch): numbers alone are used again."""

    host: str
    processes: dict[str, float]
    slurm_job: str | None

    @property
    def words(self) -> str:
        """For a person."""
        job = f", Slurm job {self.slurm_job}" if self.slurm_job else ""
        return f"process {' and '.join(self.processes)} on {self.host}{job}"


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """This job's name, the same after a requeue; None outside of Slurm."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment.get('SLURM_ARRAY_TASK_ID')}" if array else environment.get("SLURM_JOB_ID")


class Lock:
    """The right to run one cell, from ``acquire`` to ``release``."""

    def __init__(self, out: Path, cell_id: str) -> None:
        self._out, self._path = out, out / FOLDER / cell_id
        self._processes = {str(os.getpid()): _started(os.getpid())}

    def acquire(self) -> Holder | None:
        """Take the cell, or say who has it."""
        with _guard(self._out):
            other = holder(self._out, self._path.name)
            if other is not None:
                return other
            self._write()
        return None

    def add(self, pid: int) -> None:
        """Let the cell's own process hold it, too."""
        self._processes[str(pid)] = _started(pid)
        self._write()

    def release(self) -> None:
        """Give the cell back."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        write_whole(self._path, json.dumps(asdict(Holder(socket.gethostname(), self._processes, slurm_job()))))


def holder(out: Path, cell_id: str) -> Holder | None:
    """Who runs a cell; None where nobody does, or did and is gone, or this Slurm job did before it was requeued."""
    try:
        found = Holder(**json.loads((out / FOLDER / cell_id).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    if found.host == socket.gethostname():
        lives = any(started and _started(int(pid)) == started for pid, started in found.processes.items())
    elif found.slurm_job is not None:
        lives = found.slurm_job != slurm_job() and _slurm_knows(found.slurm_job, int(time.monotonic()) // _ASK_EVERY)
    else:
        lives = True
    return found if lives else None


def _started(pid: int) -> float:
    """When a process started; 0 where there is none, or nothing but its exit code is left of it."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


# States of a job that Slurm will not go on with.
_ENDED = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"],
)


@cache
def _slurm_knows(job: str, moment: int) -> bool:
    """Whether squeue lists the job; taken for granted where there is no squeue, or no answer. Asked once a moment."""
    if shutil.which("squeue") is None:
        return True
    asked = ["squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return True
    if answer.returncode:
        return "Invalid job id" not in answer.stderr
    return any(state not in _ENDED for state in answer.stdout.split())


@contextmanager
def _guard(out: Path) -> Iterator[None]:
    """Looking at a lock and taking it are one step for processes that see the same file system."""
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    with (out / FOLDER / ".guard").open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
