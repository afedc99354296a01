"""A run of the driver on two processes, observed and disturbed from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megatron_lowprec.files import json_lines
from megatron_lowprec.training.checkpoint import storage

REPOSITORY = Path(__file__).resolve().parents[2]
_LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# The flags that docs/guide/clusters.md recommends.
_SIGNALS = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
_PARTIAL = "iter_*.partial.*"
_TOKEN = "MEGATRON_LOWPREC_FAULT_INJECTION"
_STEP = re.compile(r"^ iteration +\d+/", re.MULTILINE)
_PATIENCE = 1800.0  # seconds, for machines under load


class Failure(Exception):  # noqa: N818 - of the run, not of this tool
    """A run did not survive a fault; the message names the symptom and the log."""


class Run:
    """One start of a run; later starts continue in the same folder.

    Args:
        save: the --save folder; the log is written next to it.
        options: of pretrain_gpt.py.
        script: that torchrun starts; default pretrain_gpt.py.
        launcher: more options of torchrun.
    """

    def __init__(
        self, save: Path, options: list[str], script: Path | None = None, launcher: tuple[str, ...] = ()
    ) -> None:
        self.save = save
        number = len(list(save.parent.glob(f"{save.name}.*.log")))
        self.log = save.with_name(f"{save.name}.{number}.log")
        self._token = f"{save}.{number}"
        self._earlier_partials = set(save.glob(_PARTIAL))
        command = [sys.executable, *_LAUNCHER, *_SIGNALS, *launcher, str(script or REPOSITORY / "pretrain_gpt.py")]
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
        save.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as output:
            self.torchrun = subprocess.Popen(
                [*command, *options, "--save", str(save)],
                stdout=output,
                stderr=output,
                env={**os.environ, **environment, _TOKEN: self._token},
            )

    @property
    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def iteration(self) -> int:
        """The last iteration logged by this start or an earlier one."""
        return max((row["iteration"] for row in rows(self.save) if "lm loss" in row), default=0)

    def ranks(self) -> list[psutil.Process]:
        """The two rank processes, in order."""
        children = psutil.Process(self.torchrun.pid).children()
        return sorted((child for child in children if "RANK" in child.environ()), key=lambda p: p.environ()["RANK"])

    def listen(self, number: signal.Signals) -> bool:
        """Whether both ranks have a handler for a signal; without one it terminates them."""
        try:
            caught = [_caught(rank.pid) >> (number - 1) & 1 for rank in self.ranks()]
        except (psutil.Error, OSError):  # a process that is just starting
            return False
        return caught == [1, 1]

    def wait(self, until: Callable[[], Any], what: str, poll: float = 0.002) -> None:
        """Wait for a condition; raises Failure if the run ends first."""
        end = time.monotonic() + _PATIENCE
        while not until():
            if self.torchrun.poll() is not None:
                raise Failure(f"ended before {what}: {self.log}")
            if time.monotonic() > end:
                self.kill_all()
                raise Failure(f"{what} did not happen within {_PATIENCE:.0f} s: {self.log}")
            time.sleep(poll)

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait until this start has logged it; an earlier start may have logged iterations that are repeated."""
        self.wait(lambda: _STEP.search(self.printed), "a step", poll=0.05)
        self.wait(lambda: self.iteration >= iteration, f"iteration {iteration}")

    def wait_for_save(self) -> None:
        """Wait until a checkpoint is being written."""
        self.wait(self.partial, "a save", poll=0.0005)

    def partial(self) -> list[Path]:
        """Incomplete checkpoints of this start."""
        return [path for path in self.save.glob(_PARTIAL) if path not in self._earlier_partials]

    def send(self, number: signal.Signals) -> None:
        """A signal to torchrun."""
        self.torchrun.send_signal(number)

    def kill_rank(self, rank: int) -> None:
        """``kill -9`` of one rank."""
        self.ranks()[rank].kill()

    def kill_all(self) -> None:
        """``kill -9`` of torchrun and all its descendants, as when a machine goes down."""
        with contextlib.suppress(psutil.NoSuchProcess):
            torchrun = psutil.Process(self.torchrun.pid)
            for process in (torchrun, *torchrun.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def ended(self) -> tuple[int, float]:
        """Wait for the end; returns torchrun's exit code and the seconds waited."""
        started = time.monotonic()
        try:
            code = self.torchrun.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise Failure(f"did not end within {_PATIENCE:.0f} s: {self.log}") from None
        return code, time.monotonic() - started

    def finish(self) -> None:
        """Wait for the end of an undisturbed run, which must succeed."""
        code, _ = self.ended()
        if code:
            raise Failure(f"exit code {code} of an undisturbed start: {self.log}")

    def left_over(self, patience: float = 10.0) -> int:
        """Number of processes of this start that outlive it by ``patience`` seconds."""
        end = time.monotonic() + patience
        while found := [process for process in psutil.process_iter() if self._is_mine(process)]:
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        return len(found)

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_TOKEN) == self._token
        except psutil.Error:
            return False


def _caught(pid: int) -> int:
    """Signals that a process handles, from Linux's /proc: bit N - 1 for signal N."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("SigCgt:")[1].split()[0], 16)


def rows(save: Path) -> list[dict[str, Any]]:
    """A run's metrics, without a line that is being written."""
    return list(json_lines(save / "metrics.jsonl", print))


def exact(save: Path) -> list[tuple[int, str, str]]:
    """(iteration, which loss, its bits) of all training, validation and test losses."""
    return [(row["iteration"], key, value) for row in rows(save) for key, value in row.items() if key.endswith(" hex")]


def newest(save: Path) -> int:
    """The iteration that the next start continues from; 0 without a checkpoint."""
    return storage.tracked(str(save)) or 0
