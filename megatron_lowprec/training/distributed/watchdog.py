"""What one rank does about the end of another: it leaves, soon, and without drowning the other's error in its own.

A rank that dies leaves the others inside a collective. Under gloo that raises at once; under NCCL nothing happens until
torchrun's SIGTERM, which a thread in C++ code does not see, and torchrun waits for as long as a save may take
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

import psutil
import torch.distributed as dist

GRACE = 15.0
"""Seconds that a rank whose peer has died has to notice it; the rest of a machine is down within a minute."""
_POLL = 2.0  # seconds
_LOST_CONNECTION = ("gloo", "nccl", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class PeerWatch:
    """While it is entered: ends this process some seconds after another rank of this machine has died."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stopped = threading.Event()
        me = psutil.Process()
        mine = (rank, socket.gethostname(), me.pid, me.create_time())
        everyone: list[tuple[int, str, int, float]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        here = {other: (pid, created) for other, host, pid, created in everyone if host == mine[1] and other != rank}
        # In another namespace of processes (a container a rank) a peer cannot be seen, living or dead.
        self._peers = {other: peer for other, peer in here.items() if _alive(*peer)}

    def __enter__(self) -> PeerWatch:
        if self._peers:
            threading.Thread(target=self._watch, name="peer watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # From here on the end of another rank is no accident, or this one has an error of its own to show.
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL):
            dead = [rank for rank, peer in self._peers.items() if not _alive(*peer)]
            if dead and not self._stopped.wait(GRACE):
                say(self._rank, f"rank {dead[0]} has ended, and this one was stuck waiting for it: leaving")
                os._exit(1)


def _alive(pid: int, created: float) -> bool:
    """Whether that very process runs; one that its parent has yet to bury does not."""
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def say(rank: int, line: str) -> None:
    """One line on stderr that says whose it is."""
    print(f"pretrain_gpt.py: rank {rank}: {line}", file=sys.stderr, flush=True)


def report(error: Exception, rank: int, world_size: int) -> None:
    """Show an error that no user caused: this rank's own at once, the echo of another's end as a line and later."""
    if world_size > 1 and is_lost_connection(error):
        # torchrun notices the one that died and sends SIGTERM to the rest.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        say(rank, f"stopped, for a collective lost its connection; most likely another rank has ended ({first})")
        time.sleep(GRACE)
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    print("\n".join(f"[rank {rank}] {line}" if world_size > 1 else line for line in lines), file=sys.stderr, flush=True)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another process, as far as its error tells."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_CONNECTION)
