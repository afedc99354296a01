"""Reasons to stop a run before its last iteration, and the requeue request to the batch script.

torchrun turns every worker's exit code into 1, so an exit code cannot request a requeue: the file ``SAVE/requeue``
does. It exists if and only if a run was interrupted with work left, and the state to resume from is safely on disk.
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
from megatron_lowprec.training.distributed.subprocesses import SIGNALS
from megatron_lowprec.training.options.training_options import TrainingOptions

REQUEUE = "requeue"


class Interrupted(BaseException):
    """SIGTERM or SIGUSR1 before the first step. Not an Exception, so that no handler treats it as an error."""


class PeerLost(BaseException):
    """Another rank has exited and reported its own error: a collective failed after torchrun's SIGTERM, or the SIGTERM
    came before the first step.
    """


class Signals:
    """Signals received by this process.

    During setup a signal raises ``Interrupted`` at once, since there is no state to save and setup can take long.
    After ``defer()`` it is only recorded, for the loop's ``StopReasons``.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.deferred = False

    @contextmanager
    def listening(self, enabled: bool = True) -> Iterator[None]:
        """Installs the handlers and restores the old ones at the end; only Python's main thread may call it."""
        before: dict[signal.Signals, Any] = {}
        try:
            if enabled:
                before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def defer(self) -> None:
        """Record signals for the loop from here on."""
        self.deferred = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Slurm signals every process of a step and torchrun forwards its own: the same signal may come twice.
        first, self.received = self.received is None, self.received or signal.Signals(number).name
        if first and not self.deferred:
            raise Interrupted(self.received)


@dataclass(frozen=True)
class Stop:
    """Why a run ends early.

    Attributes:
        reason: for the log.
        requeue: work is left and the user did not request the end: requeue the job.
        at_once: skip an evaluation that is due; the next start makes up for it.
        error: the message of a failed run.
    """

    reason: str
    requeue: bool
    at_once: bool
    error: str | None = None


class StopReasons:
    """Checks for a reason to stop; all ranks call it together and get the same answer.

    With several ranks, a signal on one of them or one rank's time limit takes effect at the next call: one step later,
    or one batch of an evaluation.

    Args:
        timeout_minutes: after which the collective of a call fails.
        started: ``Ranks.started``.
    """

    def __init__(self, config: TrainingOptions, timeout_minutes: int, signals: Signals, started: float) -> None:
        from megatron_lowprec.training.distributed.rank_sync import AsyncAnyReduce

        self._config, self._signals, self._started = config, signals, started
        self._any_rank = AsyncAnyReduce(timedelta(minutes=timeout_minutes))

    def after(self, iteration: int) -> Stop | None:
        """A reason to stop after this iteration."""
        interval = self._config.exit_interval
        # The last iteration ends the run, with the evaluations that follow.
        if interval is not None and iteration % interval == 0 and iteration != self._config.train_iters:
            return Stop(f"--exit-interval {interval}", requeue=False, at_once=False)
        return self.interrupted()

    def interrupted(self) -> Stop | None:
        """A reason to stop immediately: a signal on any rank, or --exit-duration-in-mins by any rank's clock."""
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
    """Whether a signal is torchrun's, which sends SIGTERM to all ranks of a machine once one of them has exited.

    With a SIGTERM from outside, the first rank to check finds all of them alive.
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
    """Write ``SAVE/requeue``: the iteration that the next start resumes from, if known, and the reason."""
    if save is None:
        return
    Path(save).mkdir(parents=True, exist_ok=True)
    where = "before the first step" if iteration is None else f"at iteration {iteration}"
    atomic_write(Path(save) / REQUEUE, f"{reason} {where}\n")


def clear_requeue(save: str | None) -> None:
    """Remove an old request at startup, so that a run that cannot start is not requeued for ever."""
    if save is not None:
        (Path(save) / REQUEUE).unlink(missing_ok=True)
