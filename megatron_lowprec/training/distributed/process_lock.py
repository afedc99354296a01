"""A lock file that names the processes which hold it, so that a dead holder is detected.

On this host a process is identified by its pid and start. A process of another host cannot be inspected: Slurm is
queried for its job, if it has one, and a holder with a heartbeat counts as dead some minutes after the last one. Locks
of the file system would be released automatically, but not every network file system has them, or releases them when a
host goes down.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

from megatron_lowprec.files import atomic_write, parse_json
from megatron_lowprec.training.distributed.file_lock import lock
from megatron_lowprec.training.distributed.process_start import boot_id, start_ticks

BEAT = 20.0
"""Seconds between heartbeats."""
DEAD_AFTER = 300.0
"""Seconds without a heartbeat after which a holder counts as dead; ample for a process that other code keeps busy."""
_ASK_EVERY = 30  # seconds between Slurm queries about a job; tables are drawn more often
_GUARD = ".guard"


@dataclass(frozen=True)
class Holder:
    """The holder of a lock.

    Attributes:
        host: its host name.
        processes: pid and start (``start_ticks``) of each; pids alone are reused.
        slurm_job: the processes' job.
        namespace: pid namespace; a container has its own.
        beats: whether the file's modification time is a heartbeat.
        boot: ``boot_id`` of the host; None in files of earlier versions, whose starts moved with the clock.
        slurm_restart: how often the job had been requeued; None in files of earlier versions.
    """

    host: str
    processes: dict[str, float]
    slurm_job: str | None
    namespace: str | None = None
    beats: bool = False
    boot: str | None = None
    slurm_restart: str | None = None

    @property
    def words(self) -> str:
        """Text for messages."""
        job = f", Slurm job {self.slurm_job}" if self.slurm_job else ""
        return f"process {' and '.join(self.processes)} on {self.host}{job}"

    @property
    def is_here(self) -> bool:
        """Whether this process can inspect the holder's processes."""
        return self.host == socket.gethostname() and (not self.beats or self.namespace == _namespace())

    def living(self) -> Holder:
        """The holder without its processes that have ended, such as a killed sweep; as it is on another host."""
        if not self.is_here:
            return self
        return replace(self, processes=self.running() or self.processes)  # the last one may have ended just now

    def running(self) -> dict[str, float]:
        """Those of the processes that run on this host."""
        if self.boot is None:
            return {pid: start for pid, start in self.processes.items() if start_ticks(pid)}
        found = self.processes.items() if self.boot == boot_id() else ()
        return {pid: start for pid, start in found if start and start_ticks(pid) == start}


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """This job's id, the same after a requeue; None outside of Slurm."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment.get('SLURM_ARRAY_TASK_ID')}" if array else environment.get("SLURM_JOB_ID")


def slurm_restart(environment: Mapping[str, str] = os.environ) -> str:
    """How often this job has been requeued; Slurm sets the variable from the first time on."""
    return environment.get("SLURM_RESTART_COUNT", "0")


class ProcessLock:
    """A lock of this process, from ``acquire`` to ``release``.

    Args:
        path: the lock file; its folder is created.
        beats: write a heartbeat, by which other hosts detect that this process has died.
    """

    def __init__(self, path: Path, beats: bool = False) -> None:
        self._path, self._beats = path, beats
        self._processes: dict[str, float] = {str(os.getpid()): start_ticks(os.getpid())}
        self._written: str | None = None
        self._released = threading.Event()

    def acquire(self) -> Holder | None:
        """Take the lock, or return its holder. If it is held already but its file is gone, write the file again."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with lock(str(self._path.parent / _GUARD)):  # check and take atomically
            if self._is_mine():
                return None
            other = holder(self._path)
            if other is not None:
                return other
            first = self._written is None
            self._write()
        if self._beats and first:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return None

    def add(self, pid: int) -> None:
        """Add another process of this host as a holder."""
        self._processes[str(pid)] = start_ticks(pid)
        self._write()

    def release(self) -> None:
        """Release the lock, if it is still held by this process."""
        self._released.set()
        if self._is_mine():
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        mine = Holder(
            socket.gethostname(),
            self._processes,
            slurm_job(),
            _namespace(),
            self._beats,
            boot_id(),
            slurm_restart(),
        )
        self._written = json.dumps(asdict(mine))
        atomic_write(self._path, self._written)

    def _is_mine(self) -> bool:
        try:
            return self._written is not None and self._path.read_text(encoding="utf-8") == self._written
        except OSError:
            return False

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            with suppress(OSError):  # the file system may be unavailable for a moment
                if self._is_mine():
                    os.utime(self._path)


def holder(path: Path) -> Holder | None:
    """The holder of a lock; None if it is free, its holder has died, or was this Slurm job before a requeue."""
    found = _read(path)
    if found is None:
        return None
    if found.is_here:
        lives = bool(found.running())
        return found if lives else None
    if found.slurm_job is not None:
        if found.slurm_job == slurm_job():
            # Another step of this allocation lives by its heartbeat.
            gone = found.slurm_restart != slurm_restart()
        else:
            gone = not _slurm_knows(found.slurm_job, int(time.monotonic()) // _ASK_EVERY)
        if gone:
            return None
    return found if not found.beats or _age(path) < DEAD_AFTER else None


def _read(path: Path) -> Holder | None:
    """The content of a lock file; None if it is missing, or not what this module writes."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        found = Holder(**{field.name: content[field.name] for field in fields(Holder) if field.name in content})
        texts = [found.slurm_job, found.namespace, found.boot, found.slurm_restart]
        valid = (
            isinstance(found.host, str)
            and all(pid.isdecimal() and isinstance(start, (int, float)) for pid, start in found.processes.items())
            and all(text is None or isinstance(text, str) for text in texts)
        )
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None
    return found if valid else None


def _age(path: Path) -> float:
    """Seconds since a file was written, by the clock of its file system: hosts' clocks may differ."""
    guard = path.parent / _GUARD
    guard.touch()
    return guard.stat().st_mtime - path.stat().st_mtime


def _namespace() -> str | None:
    """The kernel's name of this process's pid namespace; None without namespaces."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


# States of a job that Slurm will not continue.
_ENDED = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"],
)


@cache
def _slurm_knows(job: str, period: int) -> bool:
    """Whether squeue lists the job; True without squeue or an answer. Cached for each value of ``period``."""
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
