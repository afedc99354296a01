"""Why a run stops before its last iteration, and how a batch script learns that it should be started again.

torchrun turns every worker's exit code into 1, so no exit code can ask for another start: the file ``SAVE/requeue``
does. It is there if and only if a run was interrupted with work left, and what a new start needs is safely on disk.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from megatron_lowprec.files import atomic_write
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.distributed.subprocesses import SIGNALS

REQUEUE = "requeue"


class Interrupted(BaseException):
    """SIGTERM or SIGUSR1 before the first step. Not an Exception: nothing on its way may take it for a fault."""


class PeerLost(BaseException):
    """Another rank has ended, and has its own error shown: a collective failed after torchrun's SIGTERM, or that came
    before the first step.
    """


class Signals:
    """The signals that this process was sent.

    While a run is being set up a signal raises ``Interrupted`` at once, for there is nothing to save and setting up can
    take long. From ``defer()`` on it is noted only, and the loop asks ``StopReasons``.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.deferred = False

    @contextmanager
    def listening(self, enabled: bool = True) -> Iterator[None]:
        """Handlers installed, and put back in the end; only Python's main thread may call it."""
        before: dict[signal.Signals, Any] = {}
        try:
            if enabled:
                before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def defer(self) -> None:
        """From here on a signal waits for the loop."""
        self.deferred = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Slurm signals every process of a step and torchrun passes its own on: the same signal may come twice.
        first, self.received = self.received is None, self.received or signal.Signals(number).name
        if first and not self.deferred:
            raise Interrupted(self.received)


@dataclass(frozen=True)
class Stop:
    """Why a run ends early.

    Attributes:
        reason: for the log.
        requeue: work is left and the end was not requested: start again.
        at_once: skip an evaluation that is due; the next start makes up for it.
        error: the message of a failed run.
    """

    reason: str
    requeue: bool
    at_once: bool
    error: str | None = None


class StopReasons:
    """Looks for a reason to stop; all ranks ask together and get the same answer.

    A signal on one rank of several, and the end of the time by one rank's clock, are answered when they ask again: one
    step later, or one batch of an evaluation.
    """

    def __init__(self, config: Config, signals: Signals, started: float) -> None:
        from megatron_lowprec.training.distributed.rank_sync import AsyncAnyReduce

        self._config, self._signals, self._started = config, signals, started
        self._any_rank = AsyncAnyReduce(timedelta(minutes=config.distributed_timeout_minutes))

    def after(self, iteration: int) -> Stop | None:
        """A reason to stop after this iteration."""
        interval = self._config.exit_interval
        if interval is not None and iteration % interval == 0:
            return Stop(f"--exit-interval {interval}", requeue=False, at_once=False)
        return self.interrupted()

    def interrupted(self) -> Stop | None:
        """A reason to stop right here: a signal on any rank, or --exit-duration-in-mins by any rank's clock."""
        minutes = self._config.exit_duration_in_mins
        if minutes is None and not self._config.exit_signal_handler:
            return None
        names = [number.name for number in SIGNALS]
        late = minutes is not None and (time.monotonic() - self._started) / 60 > minutes
        found = self._any_rank([*(self._signals.received == name for name in names), late])
        for reason, here in zip([*names, f"--exit-duration-in-mins {minutes}"], found, strict=True):
            if here:
                return Stop(reason, requeue=True, at_once=True)
        return None

    def finish(self) -> None:
        """Waits for the pending all-reduce."""
        self._any_rank.finish()


def follows_a_failure(signal_name: str, local_world_size: int) -> bool:
    """Whether a signal is torchrun's, which ends all ranks of a machine by SIGTERM once one of them has ended.

    Of ranks that a SIGTERM from outside ends, the first to ask finds all of them alive.
    """
    if signal_name != signal.SIGTERM.name or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    me = psutil.Process()
    with suppress(psutil.Error):
        return sum(_runs_the_same(child, me) for child in psutil.Process(os.getppid()).children()) < local_world_size
    return False


def _runs_the_same(process: psutil.Process, other: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.cmdline() == other.cmdline()
    except psutil.Error:
        return False


def ask_requeue(save: str | None, iteration: int | None, reason: str) -> None:
    """Write ``SAVE/requeue``: the iteration that a new start continues from, where known, and the reason."""
    if save is None:
        return
    Path(save).mkdir(parents=True, exist_ok=True)
    where = "before the first step" if iteration is None else f"at iteration {iteration}"
    atomic_write(Path(save) / REQUEUE, f"{reason} {where}\n")


def clear_requeue(save: str | None) -> None:
    """At a start: an old request must not outlive it, or a run that cannot start would be started for ever."""
    if save is not None:
        (Path(save) / REQUEUE).unlink(missing_ok=True)
