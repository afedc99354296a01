"""Runs jobs on the GPUs or the cores of this machine, one per place."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from megatron_lowprec.errors import UserError
from megatron_lowprec.sweep import job_record as record
from megatron_lowprec.sweep.job_record import Lock, Record, State
from megatron_lowprec.sweep.jobs import Job, command, evaluation, keep_flags, keep_older_scores
from megatron_lowprec.sweep.spec import Resources
from megatron_lowprec.sweep.status import Progress, read_progress
from megatron_lowprec.sweep.view import View
from megatron_lowprec.training.distributed.visible_gpus import given_gpus, lost_gpus

REQUEUE = "requeue"
"""File in a job's folder: the job was interrupted and must be requeued. Written by the driver and by this module."""
LOG = "log.txt"
# Slurm sends SIGTERM to all processes of a task. torchrun would kill its ranks half a minute later, saved or not; this
# shell ignores the signal and ends with the last of them.
_DEAF = ("bash", "-c", 'trap "" TERM USR1; exec "$@"', "bash")
_POLL = 0.2  # seconds
_ASK_AGAIN = 10.0  # seconds
_TWICE = 1.0  # seconds; a Ctrl-C within this time is the same one, forwarded by a program in between


@dataclass(frozen=True)
class Place:
    """Slot for one job at a time: GPUs by CUDA's names, none on a CPU, and threads of each process."""

    gpus: tuple[str, ...]
    processes: int
    threads: int


def visible_gpus() -> list[str]:
    """Names of the GPUs visible to torch, for CUDA_VISIBLE_DEVICES; queried in a separate process.

    Raises:
        UserError: torch cannot be queried, or sees none of the GPUs that this process was given.
    """
    code = "import torch; print(torch.cuda.device_count())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode or not asked.stdout.strip().isdecimal():
        why = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise UserError(f"torch cannot be asked for GPUs: {why}; mend the environment")
    count, given = int(asked.stdout), given_gpus()
    if not count and given is not None:
        raise lost_gpus(given)
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    return names[:count] if names != [""] else [str(number) for number in range(count)]


def processes_of(resources: Resources, gpus: Sequence[str]) -> int:
    """Number of processes of a job on these GPUs, or on the CPU if there are none."""
    return resources.gpus_per_job or (1 if gpus else resources.processes_per_job)


def places(resources: Resources, gpus: Sequence[str], cores: int) -> list[Place]:
    """Slots on the GPUs, or on the cores if there are no GPUs.

    Raises:
        UserError: a job needs more GPUs than there are.
    """
    size, share, limit = resources.gpus_per_job, resources.jobs_per_gpu, resources.jobs_at_once
    if size is not None and size > len(gpus):
        raise UserError(
            f"a job needs {size} GPU{'s' * (size > 1)} (gpus_per_job), found {len(gpus)}; run it where they are, or "
            "submit it with --slurm"
        )
    processes = processes_of(resources, gpus)
    if gpus:
        sets = [tuple(gpus[start : start + processes]) for start in range(0, len(gpus) - processes + 1, processes)]
        # each GPU gets one job before any gets a second
        sets = [chosen for _ in range(share) for chosen in sets][:limit]
    else:
        sets = [()] * (limit or 1)
    return [Place(chosen, processes, max(1, cores // (len(sets) * processes))) for chosen in sets]


def launch(arguments: Sequence[str], processes: int) -> list[str]:
    """Command that starts a script with that many processes; several by torchrun, which chooses a free port."""
    if processes == 1:
        return [sys.executable, *arguments]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*_DEAF, sys.executable, *torchrun, "--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", *arguments]


def outcome(exit_code: int, stopped: bool, asks_requeue: bool, iteration: int, train_iters: int) -> State:
    """State after an attempt. torchrun's exit code does not distinguish an interrupted run from a failed one."""
    if exit_code == 0 and iteration >= train_iters and not asks_requeue:
        return "done"
    # exit code 0 before the end: --exit-interval and the like
    return "interrupted" if asks_requeue or stopped or exit_code == 0 else "failed"


def is_stopped(exit_code: int, killed: bool, asked_to_stop: bool, begun: bool) -> bool:
    """Whether a signal ended an attempt that wrote no ``requeue``, and no fault, which each attempt would repeat.

    ``begun``: it has logged something, and has iterations left.
    """
    # Slurm signals jobs without handlers as well. A rank that is asked to stop before the others listen ends them, with
    # torchrun's exit code of a fault.
    return killed or exit_code in (-signal.SIGTERM, -signal.SIGUSR1) or (asked_to_stop and exit_code == 1 and not begun)


@dataclass
class _Running:
    """A job that occupies a slot: its training, then its evaluation."""

    job: Job
    training: bool
    place: Place
    record: Record
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    lock: Lock
    started: float
    before: Progress
    killed: bool = False

    def kill(self) -> None:
        """End all processes of the job at once."""
        self.killed = True
        # torchrun gives each worker its own session
        _send(signal.SIGKILL, [self.process.pid, *_children(self.process.pid)])


@dataclass(frozen=True)
class Result:
    """Result of a call: ids of ended jobs by state, of jobs running elsewhere, and of jobs not started; and why."""

    ended: dict[State, list[str]]
    held: list[str]
    left: list[str]
    signal: str | None
    too_many_failures: bool


class Runner:
    """Runs jobs in slots; one instance per call of ``run``."""

    def __init__(
        self,
        out: Path,
        jobs: Sequence[Job],
        view: View,
        rerun: bool,
        max_failures: int | None = None,
        start_within: float = math.inf,
    ) -> None:
        self._out, self._view, self._rerun, self._max_failures = out, view, rerun, max_failures
        self._last_start = time.monotonic() + start_within
        self._waiting = list(jobs)
        self._running: list[_Running] = []
        self._ended: dict[State, list[str]] = {"done": [], "failed": [], "interrupted": []}
        self._held: list[str] = []
        self._signal: str | None = None
        self._signalled_at = self._told_at = 0.0
        self._told = self._kill_asked = False

    def run(self, where: Sequence[Place]) -> Result:
        """Run all jobs that are not done; at SIGINT, SIGTERM or SIGUSR1 let the running ones save, and stop."""
        free = list(where)
        with _signals(self._on_signal), self._view:
            try:
                while self._step(free):
                    time.sleep(_POLL)
                    self._view.refresh()
            finally:  # also after an error in this module
                self._stop()
        left = [job.id for job in self._waiting]
        return Result(self._ended, self._held, left, self._signal, self._too_many_failures())

    def _step(self, free: list[Place]) -> bool:
        """Collect ended jobs and start waiting ones; returns whether any is running."""
        ended = [running for running in self._running if running.process.poll() is not None]
        free += [place for running in ended if (place := self._finish(running)) is not None]
        if self._signal is None:
            while free and not self._too_many_failures() and (job := self._next()) is not None:
                self._start(job, free)
        else:
            self._stop()
        if self._kill_asked:
            for running in self._running:
                running.kill()
        return bool(self._running)

    def _next(self) -> Job | None:
        """Take the first waiting job; after the time of the last start the first one that only lacks its scores."""
        late = time.monotonic() >= self._last_start
        for place, job in enumerate(self._waiting):
            if not late or self._only_scores(job):
                return self._waiting.pop(place)
        return None

    def _only_scores(self, job: Job) -> bool:
        if evaluation(job, self._out / job.id) is None:
            return False
        before = record.read(self._out / job.id)
        return before is not None and before.state == "done" and not record.differences(before, job)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._signalled_at = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._signalled_at > _TWICE:
            self._kill_asked = True

    def _too_many_failures(self) -> bool:
        return self._max_failures is not None and len(self._ended["failed"]) >= self._max_failures

    def _start(self, job: Job, free: list[Place]) -> None:
        """Start a job in a free slot, unless it is done or running in another process."""
        lock, run = Lock(self._out, job.id), self._out / job.id
        other = lock.acquire()
        if other is not None:
            self._held.append(job.id)
            self._view.say(f"{job.id}: left to {other.words}")
            return
        try:
            before = record.read(run)
            if before is not None and record.differences(before, job):
                assert self._rerun, "check() refuses it"
                self._view.say(f"{job.id}: changed since it was begun; its folder is now {move_aside(run).name}")
                before = None
            trained = before is not None and before.state == "done"
            if trained and evaluation(job, run) is None:
                lock.release()
                return
            run.mkdir(parents=True, exist_ok=True)
            (run / REQUEUE).unlink(missing_ok=True)  # this start answers the request
            self._launch(job, not trained, free.pop(0), lock)
        except BaseException:
            lock.release()
            raise

    def _launch(self, job: Job, training: bool, place: Place, lock: Lock) -> None:
        """Start a job's training or its evaluation. The record is the training's; ``jobs.EVALUATION`` says the rest."""
        run = self._out / job.id
        arguments = command(job, run) if training else evaluation(job, run)
        assert arguments is not None, "a scored job is not started"
        if not training:
            keep_older_scores(run)
        words = launch(arguments, place.processes)
        before = record.read(run)
        begun = record.begin(job, run, words) if training or before is None else before
        progress = read_progress(run)
        log = (run / LOG).open("ab", buffering=0)
        log.write(f"# {record.now()}, attempt {begun.attempts}: {shlex.join(words)}\n".encode())
        # A separate session: a terminal's Ctrl-C reaches only this process, which forwards it.
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(place),
            start_new_session=True,
        )
        lock.add(process.pid)
        self._running.append(_Running(job, training, place, begun, process, log, lock, time.monotonic(), progress))
        on = f" on GPU {','.join(place.gpus)}" if place.gpus else ""
        again = f", attempt {begun.attempts}" if begun.attempts > 1 else ""
        self._view.say(f"{job.id}: {'started' if training else 'scoring'}{on}{again if training else ''}")

    def _finish(self, running: _Running) -> Place | None:
        """Record a job's result; returns its slot, or None if the job's evaluation now occupies it."""
        job, run, code = running.job, self._out / running.job.id, running.process.returncode
        progress, seconds = read_progress(run), time.monotonic() - running.started
        begun = progress != running.before and progress.iteration < job.train_iters
        stopped = is_stopped(code, running.killed, self._signal is not None, begun)
        state = outcome(code, stopped, (run / REQUEUE).exists(), progress.iteration, job.train_iters)
        running.log.close()
        if running.training:
            record.end(run, running.record, state, code, seconds, progress.iteration)
        elif state == "done" and not keep_flags(job, run):
            state = "failed"
        self._running.remove(running)
        self._view.ended(job.id, state, seconds, progress, code, run / LOG)
        if state == "done" and running.training and evaluation(job, run) is not None:
            if self._signal is None:
                self._launch(job, False, running.place, running.lock)
                return None
            state = "interrupted"  # the sweep's next call scores it
        by = self._signal or (signal.Signals(-code).name if code < 0 else None)
        if state == "interrupted" and by is not None and not (run / REQUEUE).exists():
            (run / REQUEUE).write_text(f"{by} at iteration {progress.iteration}\n", encoding="utf-8")
        running.lock.release()
        self._ended[state].append(job.id)
        return running.place

    def _stop(self) -> None:
        """Signal running jobs to save and exit; repeatedly, since one that is starting may ignore signals."""
        if not self._running or (self._told and time.monotonic() - self._told_at < _ASK_AGAIN):
            return
        first, self._told, self._told_at = not self._told, True, time.monotonic()
        for running in self._running:
            if running.training:
                ask_to_stop(running.process.pid, running.place.processes)
            else:
                running.kill()  # it has nothing to save, and under torchrun no handler
        if first:
            names = ", ".join(running.job.id for running in self._running)
            self._view.say(f"{self._signal or 'an error'}: waiting for {names} to save; Ctrl-C again kills")


def check(out: Path, jobs: Sequence[Job], rerun: bool) -> None:
    """Reject jobs whose folders were created for other runs, before any job starts.

    Raises:
        UserError: naming the differences of the first such job.
    """
    changed = {}
    for job in jobs:
        before = record.read(out / job.id)
        differing = record.differences(before, job) if before is not None else []
        if differing:
            changed[job.id] = differing
    if changed and not rerun:
        name, differing = next(iter(changed.items()))
        raise UserError(
            f"{len(changed)} of {len(jobs)} jobs were started as other runs: {name} has "
            f"{', '.join(differing[:6])}{' and more' if len(differing) > 6 else ''}; give the earlier options, another "
            "--out, or --rerun to move the old folders aside and start anew"
        )


def move_aside(run: Path) -> Path:
    """Rename a folder to the first free name of NAME.1, NAME.2 and so on."""
    number = 1
    while (aside := run.with_name(f"{run.name}.{number}")).exists():
        number += 1
    return run.rename(aside)


def environment(place: Place) -> dict[str, str]:
    """A job's environment variables: its GPUs, its share of the cores."""
    found = {"OMP_NUM_THREADS": str(place.threads), **os.environ, "PYTHONUNBUFFERED": "1"}
    if place.gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    return found


def ask_to_stop(pid: int, processes: int) -> None:
    """Send SIGTERM to the training processes.

    torchrun, if used, ignores the signal (see ``launch``) and exits after them.
    """
    _send(signal.SIGTERM, (_children(pid) if processes > 1 else []) or [pid])


def _send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Handle signals. SIGHUP is a closed terminal (ignored under nohup, as SIGINT in a shell's background, and both
    stay ignored); SIGTERM and SIGUSR1 come from a batch script, which ignores them until here and sends them again."""
    quiet = (number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN)
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGUSR1, *quiet)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
