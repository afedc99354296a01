"""Exits when a peer rank dies: soon, and without hiding the peer's error behind its own.

A rank that dies leaves the others inside a collective. gloo raises at once; under NCCL nothing happens until torchrun's
SIGTERM. A thread in C++ code does not see that signal, and torchrun waits for as long as a save may take
(--shutdown-timeout). So a thread watches the processes of the other ranks of this machine.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback

import torch.distributed as dist

from megatron_lowprec.training.distributed.process_start import start_ticks

GRACE = 15.0
"""Seconds for a rank to notice a dead peer before it is ended; a whole machine is down within a minute."""
_POLL = 2.0  # seconds
_LOST_CONNECTION = ("gloo", "nccl", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class PeerWatch:
    """Context manager that ends this process some seconds after another rank of this machine has died."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stopped = threading.Event()
        mine = (rank, socket.gethostname(), os.getpid(), start_ticks(os.getpid()))
        everyone: list[tuple[int, str, int, int]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        here = {other: (pid, start) for other, host, pid, start in everyone if host == mine[1] and other != rank}
        # In another pid namespace (a container per rank) peers are invisible, whether alive or dead.
        self._peers = {other: peer for other, peer in here.items() if _alive(*peer)}

    def __enter__(self) -> PeerWatch:
        if self._peers:
            threading.Thread(target=self._watch, name="peer watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # From here on another rank's exit is expected, or this one has an error of its own to show.
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL):
            dead = [rank for rank, peer in self._peers.items() if not _alive(*peer)]
            if dead and not self._stopped.wait(GRACE):
                say(self._rank, f"rank {dead[0]} has ended, and this one was stuck waiting for it: leaving")
                os._exit(1)


def _alive(pid: int, start: int) -> bool:
    """Whether exactly that process runs; a zombie does not count."""
    return start_ticks(pid) == start


def say(rank: int, line: str) -> None:
    """Print one line to stderr, prefixed with the rank."""
    print(f"pretrain_gpt.py: rank {rank}: {line}", file=sys.stderr, flush=True)


def report(error: Exception, rank: int, world_size: int) -> None:
    """Print an unexpected error: this rank's own at once; one caused by a peer's exit as one line, later."""
    if world_size > 1 and is_lost_connection(error):
        # torchrun detects the dead rank and sends SIGTERM to the rest.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        say(rank, f"stopped, for a collective lost its connection; most likely another rank has ended ({first})")
        time.sleep(GRACE)
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    print("\n".join(f"[rank {rank}] {line}" if world_size > 1 else line for line in lines), file=sys.stderr, flush=True)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective's error indicates a failure of another process."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_CONNECTION)
