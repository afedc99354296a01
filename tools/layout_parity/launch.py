"""Launches of torchrun, several at a time where there are GPUs for them; their rows are there while they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tools.layout_parity.plan import Launch
from tools.layout_parity.worker import rows_of

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Done:
    """How a launch ended."""

    name: str
    seconds: float
    code: int
    said: str = ""


@dataclass
class Runner:
    """Starts launches in a folder.

    Args:
        gpus: of this machine to use; 0 for CPU cores.
        at_once: launches that may run at a time; each takes those GPUs on which the fewest run, for they are small.
        timeout: seconds of one launch.
    """

    folder: Path
    gpus: int = 0
    at_once: int = 1
    timeout: float = 3600.0
    done: list[Done] = field(default_factory=list)

    def run(self, launches: Iterable[Launch], tick: Callable[[], None] = lambda: None) -> None:
        """All of them, larger ones first; ``tick`` is called about every second."""
        waiting = sorted(launches, key=lambda launch: -launch.processes)
        running: list[_Running] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.at_once:
                    launch = waiting.pop(0)
                    taken = Counter(gpu for one in running for gpu in one.gpus)
                    mine = sorted(range(self.gpus), key=lambda gpu: (taken[gpu], gpu))[: launch.processes]
                    running.append(_Running(launch, mine, self))
                time.sleep(0.2)
                for one in list(running):
                    if one.ended():
                        self.done.append(one.done())
                        running.remove(one)
                tick()
        finally:
            for one in running:
                one.stop()

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return [row for path in sorted(self.folder.glob("*.rows.jsonl")) for row in rows_of(path)]


class _Running:
    def __init__(self, launch: Launch, gpus: list[int], runner: Runner) -> None:
        self.launch, self.gpus, self._started = launch, gpus, time.monotonic()
        self._end = self._started + runner.timeout
        stem = runner.folder / launch.name.replace(" ", "-").replace(",", "")
        asked = stem.with_suffix(".asked.json")
        asked.write_text(json.dumps({"out": f"{stem}.rows.jsonl", "groups": launch.groups}), encoding="utf-8")
        self._log: IO[str] = Path(f"{stem}.log").open("w+", encoding="utf-8")  # noqa: SIM115 - closed in done()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(launch.processes), "-m", "tools.layout_parity.worker", str(asked)]
        cache = Path("~/.cache/megatron_lowprec/triton").expanduser()
        environment = {
            # Kernels are compiled once for all launches; at these sizes there is nothing to tune.
            "TRITON_CACHE_DIR": str(cache),
            "MEGATRON_LOWPREC_TUNE": "0",
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CUDA_VISIBLE_DEVICES": ",".join(_visible(gpu) for gpu in gpus),
        }
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=self._log, stderr=subprocess.STDOUT, text=True
        )

    def ended(self) -> bool:
        if self._process.poll() is None and time.monotonic() > self._end:
            self.stop()
        return self._process.poll() is not None

    def stop(self) -> None:
        """End it; torchrun ends its processes."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def done(self) -> Done:
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read()
        self._log.close()
        errors = [line for line in said.splitlines() if "Error" in line and "ChildFailed" not in line]
        seconds = round(time.monotonic() - self._started, 1)
        return Done(self.launch.name, seconds, code, "" if code == 0 else "\n".join(errors[:3]) or said[-1000:])


def _visible(gpu: int) -> str:
    """The machine's name for one of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu] if visible else str(gpu)
