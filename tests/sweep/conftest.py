"""Sweeps of a driver that trains nothing: ``fake_driver.py``, told by files beside its folders what to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megatron_lowprec.sweep import cli, jobs, local
from tests.environment import python_path
from tests.waiting import Started

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

# What a job needs to be accepted; small enough for a real run.
OPTIONS: dict[str, Any] = {
    "train-iters": 4,
    "eval-iters": 0,
    "log-interval": 1,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "hidden-size": 64,
    "num-attention-heads": 2,
    "ffn-hidden-size": 128,
    "global-batch-size": 4,
    "mock-data": True,
}
SWEEP: dict[str, Any] = {"models": ["gpt_tiny"], "recipes": ["bf16", "mxfp4"], "seeds": [1], "options": OPTIONS}

# Jobs of SWEEP.
BF16, MXFP4 = "gpt_tiny-bf16-s1", "gpt_tiny-mxfp4-s1"

WriteSweep = Callable[..., str]


@pytest.fixture
def write_sweep(tmp_path: Path) -> WriteSweep:
    """Write SWEEP with changes as sweep.yaml; returns its path."""

    def write(**changes: Any) -> str:
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump({**SWEEP, **changes}, sort_keys=False))
        return str(path)

    return write


class Fake:
    """A sweep in ``out`` whose jobs run the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.driver = folder / "fake_driver.py"
        # Of sweep.local, in processes.
        self.constants = {"_ASK_AGAIN": 1.0}
        self.started: list[Started] = []
        shutil.copy(HERE / "fake_driver.py", self.driver)

    def behave(self, **modes: str) -> None:
        """Modes by label of a recipe; the others succeed."""
        (self.driver.parent / "modes.json").write_text(json.dumps(modes))

    def run(self, *argv: str) -> int:
        """The command line in this process."""
        return cli.main([*argv, "--out", str(self.out)])

    def start(self, *argv: str) -> Started:
        """The command line in a process of its own, for signals."""
        return self.launch([*self.program(), *argv, "--out", str(self.out)])

    def launch(self, command: list[str], **environment: str) -> Started:
        """A command that ends with its test."""
        output = self.driver.with_name(f"printed.{len(self.started)}")
        env = {**os.environ, **python_path(), **environment}
        self.started.append(Started(command, output, cwd=REPOSITORY, env=env))
        return self.started[-1]

    def end(self) -> None:
        """Kill what still runs of a test that has failed."""
        for one in self.started:
            one.process.kill()
            one.process.wait()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(word.startswith(str(self.driver.parent)) for word in process.cmdline()):
                    process.kill()

    def program(self) -> list[str]:
        """scripts/sweep.py with the stand-in."""
        code = (
            "import sys; from megatron_lowprec.sweep import cli, jobs, local; "
            f"jobs.DRIVER, jobs.EVALUATE = ({str(self.driver)!r},), ({str(HERE / 'fake_evaluate.py')!r},); "
            "local.visible_gpus = lambda: []; "
            f"vars(local).update({self.constants!r}); sys.exit(cli.main(sys.argv[1:]))"
        )
        return [sys.executable, "-c", code]

    def record(self, job_id: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / job_id / "cell.json").read_text())
        return content

    def calls(self, job_id: str) -> list[dict[str, Any]]:
        """What the stand-in noted of each of its starts."""
        path = self.out / job_id / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_until_held(self, job_id: str, processes: int = 1) -> None:
        """Until all processes of a job of the latest start wait in mode ``hold``; fails if the sweep ends first."""
        files = [self.out / job_id / f"holding.{rank}" for rank in range(processes)]
        self.started[-1].wait_until(lambda: all(file.exists() for file in files), f"{job_id} at iteration 2")

    def stopped_by(self, number: signal.Signals, *argv: str, processes: int = 1) -> tuple[int, str]:
        """Exit code and output of a sweep in a process of its own that is signaled once its first job is held."""
        sweep = self.start(*argv)
        self.wait_until_held(BF16, processes)
        sweep.process.send_signal(number)
        return sweep.ended()

    def release(self) -> None:
        """Let jobs in mode ``hold`` go on, now and from now on."""
        self.driver.with_name("release").touch()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """The stand-in on a machine without GPUs."""
    made = Fake(tmp_path)
    monkeypatch.setattr(jobs, "DRIVER", (str(made.driver),))
    monkeypatch.setattr(local, "visible_gpus", list)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    yield made
    made.end()
