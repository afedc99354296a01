"""Processes that a rank starts beside its own: they sit out the signals that are meant for it, and end when it ends.

torchrun and Slurm signal every process of a rank. A data loader's worker or a checkpoint's writer that ended there
would take the run down with it before it has saved. Nothing heavy is imported here: a process that is spawned imports
this module.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.managers import SyncManager

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


_libc = ctypes.CDLL(None)
_starting_helpers: bool | None = None


@contextmanager
def helpers() -> Iterator[None]:
    """Processes that are forked inside never see SIGNALS and end with this one; this one sees them when it leaves.

    Megatron-core's checkpoint writers wait for ever for a rank that was killed in the wrong moment, with a copy of all
    its memory.
    """
    global _starting_helpers
    if _starting_helpers is None:
        os.register_at_fork(after_in_child=_in_a_forked_process)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # A helper of multiprocessing, which must ignore the signals as well; starting it unblocks SIGTERM.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _starting_helpers = True
    try:
        yield
    finally:
        _starting_helpers = False
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_a_forked_process() -> None:
    if _starting_helpers:
        _end_with_parent()


def manager() -> SyncManager:
    """A manager of shared objects whose process ends with this one, killed or not; ``ctx.Manager()``'s lives on."""
    started = SyncManager(ctx=multiprocessing.get_context("spawn"))
    with helpers():
        started.start(_serve)
    return started


def _serve() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
