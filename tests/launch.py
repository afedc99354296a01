"""Launches of several ranks: by torchrun, or forked from a process that has imported what they need.

On two ranks, torchrun and the imports of torch and Megatron-core take nine CPU seconds, more than most small runs.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import NamedTemporaryFile
from unittest.mock import patch

import torch.distributed as dist

from tests.environment import ROOT, python_path
from tests.waiting import PATIENCE

ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def forks() -> ForkServerContext:
    """Processes on CPUs, forked from one with the modules of ``preloaded.py``, which starts at the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with patch.dict(os.environ, ON_CPU | python_path()):
        forkserver.ensure_running()
    return context


def torchrun(
    processes: int, command: Sequence[str], cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script of this repository with its arguments, or -m and a module, under torchrun; its output is captured.

    For tests of torchrun, on GPUs, and with variables that are read by imports.
    """
    script = [str(ROOT / command[0]), *command[1:]] if command[0] != "-m" else command
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *script],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **python_path(), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def fork_ranks(processes: int, command: Sequence[str], cwd: Path = ROOT) -> str:
    """As ``torchrun``, on CPUs; returns what the ranks print, and fails if one of them does."""
    codes, printed = forked(processes, command, cwd)
    assert codes == [0] * processes, printed[-6000:]
    return printed


def forked(processes: int, command: Sequence[str], cwd: Path = ROOT) -> tuple[list[int | None], str]:
    """The ranks' exit codes and what they print; if one fails, the others are ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # torchrun sets these, and has the store in its own process as well
    shared = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks, context = [], forks()
    with NamedTemporaryFile("r") as output:
        for rank in range(processes):
            environment = os.environ | ON_CPU | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(context.Process(target=_be_rank, args=(command, cwd, environment, output.name)))
            ranks[-1].start()
        _join(ranks)
        printed = output.read()
    return [rank.exitcode for rank in ranks], printed


def _join(ranks: Sequence[ForkServerProcess]) -> None:
    """Wait for all, or until one fails: then the others are ended, which may wait for it."""
    running, end = list(ranks), time.monotonic() + PATIENCE
    while running and not any(rank.exitcode for rank in ranks) and time.monotonic() < end:
        connection.wait([rank.sentinel for rank in running], PATIENCE)
        running = [rank for rank in running if rank.exitcode is None]
    for rank in running:
        rank.terminate()
        rank.join(20)
        rank.kill()
        rank.join()


def _be_rank(command: Sequence[str], cwd: Path, environment: Mapping[str, str], output: str) -> None:
    assert "tests.preloaded" in sys.modules, "its imports failed"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [str(ROOT / command[0]), *command[1:]]
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a forked process without them
