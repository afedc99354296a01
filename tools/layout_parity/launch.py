"""Runs launches of torchrun, several at a time if there are GPUs for them."""

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
from typing import Any

from megatron_lowprec.files import json_lines
from tools.layout_parity.plan import Launch

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Done:
    """The result of a launch; ``said`` holds its errors."""

    name: str
    seconds: float
    code: int
    said: str = ""


@dataclass
class Runner:
    """Starts launches in a folder."""

    folder: Path
    gpus: int = 0  # of this machine to use; 0 for CPU cores
    at_once: int = 1  # launches that run at the same time; each takes the GPUs with the fewest launches
    timeout: float = 3600.0  # seconds of one launch
    done: list[Done] = field(default_factory=list)

    def run(self, launches: Iterable[Launch], tick: Callable[[], None] = lambda: None) -> None:
        """All of them, larger ones first; ``tick`` is called while they run."""
        waiting = sorted(launches, key=lambda launch: -launch.processes)
        running: list[_Running] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.at_once:
                    launch = waiting.pop(0)
                    load = Counter(gpu for one in running for gpu in one.gpus)
                    gpus = sorted(range(self.gpus), key=lambda gpu: (load[gpu], gpu))[: launch.processes]
                    running.append(_Running(launch, gpus, self))
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
        return [row for path in sorted(self.folder.glob("*.rows.jsonl")) for row in json_lines(path, print)]


class _Running:
    def __init__(self, launch: Launch, gpus: list[int], runner: Runner) -> None:
        self.launch, self.gpus, self._started = launch, gpus, time.monotonic()
        self._end = self._started + runner.timeout
        stem = runner.folder / launch.name.replace(" ", "-").replace(",", "")
        job = Path(f"{stem}.job.json")
        job.write_text(json.dumps({"out": f"{stem}.rows.jsonl", "groups": launch.groups}), encoding="utf-8")
        self._log = Path(f"{stem}.log")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(launch.processes), "-m", "tools.layout_parity.worker", str(job)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(gpu) for gpu in range(runner.gpus)]
        environment = {
            # Kernels are compiled once for all launches; at these sizes tuning gains nothing.
            "TRITON_CACHE_DIR": str(Path("~/.cache/megatron_lowprec/triton").expanduser()),
            "MEGATRON_LOWPREC_TUNE": "0",
            "OMP_NUM_THREADS": "1",
            # On CPUs as in the driver, which sets it too late for this tool's imports: the compiler gives up a function
            # that it has compiled too often, and its roundings change in the middle of a launch.
            "TORCHDYNAMO_DISABLE": "0" if gpus else "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus),
        }
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
            )

    def ended(self) -> bool:
        if self._process.poll() is None and time.monotonic() > self._end:
            self.stop()
        return self._process.poll() is not None

    def stop(self) -> None:
        """Terminate torchrun, which terminates its ranks."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def done(self) -> Done:
        code, text = self._process.wait(), self._log.read_text(encoding="utf-8", errors="replace")
        errors = [line for line in text.splitlines() if "Error" in line and "ChildFailed" not in line]
        seconds = round(time.monotonic() - self._started, 1)
        return Done(self.launch.name, seconds, code, "" if code == 0 else "\n".join(errors[:3]) or text[-1000:])
