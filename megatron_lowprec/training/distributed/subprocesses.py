"""Helper processes of a rank: they ignore signals meant for the rank and exit with it.

torchrun and Slurm signal every process of a rank. If a data loader's worker or a checkpoint's writer exited on a
signal, the run would fail before it has saved.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


_libc = ctypes.CDLL(None)
_starting_helpers: bool | None = None
_parent = 0  # process ID of who forks


@contextmanager
def helpers() -> Iterator[None]:
    """Context: forked processes ignore SIGNALS and exit with this one; this one receives pending signals at its end.

    Megatron-core's checkpoint writers may wait for ever for a rank that was killed, with a copy of all its memory.
    """
    global _starting_helpers
    if _starting_helpers is None:
        os.register_at_fork(before=_before_a_fork, after_in_child=_in_a_forked_process)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # A helper of multiprocessing that must ignore the signals as well; starting it unblocks SIGTERM.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _starting_helpers = True
    try:
        yield
    finally:
        _starting_helpers = False
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _before_a_fork() -> None:
    global _parent
    _parent = os.getpid()


def _in_a_forked_process() -> None:
    if _starting_helpers:
        _end_with_parent()


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != _parent:  # it ended before the call, so no signal comes
        os.kill(os.getpid(), signal.SIGKILL)
