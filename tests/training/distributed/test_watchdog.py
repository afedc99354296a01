"""A rank watches the processes of its peers on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from megatron_lowprec.training.distributed import watchdog


def test_a_step_of_the_clock_is_no_end_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The date of the boot is counted back from the clock, and moves with it."""

    def gather(everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine, (1, *mine[1:])]  # this process is its own peer

    monkeypatch.setattr(watchdog.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watchdog.dist, "all_gather_object", gather)
    watch = watchdog.PeerWatch(0)
    assert watch._peers[1][0] == os.getpid()
    boot_time = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + 3600)
    assert watchdog._alive(*watch._peers[1])


def test_a_peer_that_has_ended_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = watchdog.start_ticks(process.pid)
        assert watchdog._alive(process.pid, start)
        assert not watchdog._alive(process.pid, start + 1), "a later process with its number"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not watchdog._alive(process.pid, start), "a zombie"
    assert not watchdog._alive(process.pid, start)
