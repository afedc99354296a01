"""Sweeps of a driver that trains nothing: ``fake_driver.py``, told by files beside its folders what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lowprec.sweep import cells, cli, local
from tests.environment import python_path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

# What a cell needs to be accepted; small enough for a real one, too.
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
    """A sweep in ``out`` whose cells run the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.driver = folder / "fake_driver.py"
        shutil.copy(HERE / "fake_driver.py", self.driver)

    def behave(self, **modes: str) -> None:
        """Modes by label of a recipe; the others succeed."""
        (self.driver.parent / "modes.json").write_text(json.dumps(modes))

    def run(self, *argv: str) -> int:
        """The command line in this process."""
        return cli.main([*argv, "--out", str(self.out)])

    def start(self, *argv: str, **more: str) -> subprocess.Popen[str]:
        """The command line in a process of its own, for signals."""
        return subprocess.Popen(
            [*self.program(), *argv, "--out", str(self.out)],
            cwd=REPOSITORY,
            env={**os.environ, **python_path(), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def program(self) -> list[str]:
        """scripts/sweep.py with the stand-in."""
        code = (
            "import sys; from megatron_lowprec.sweep import cells, cli, local; "
            f"cells.DRIVER = {str(self.driver)!r}; local.visible_gpus = lambda: []; local._ASK_AGAIN = 1; "
            "sys.exit(cli.main(sys.argv[1:]))"
        )
        return [sys.executable, "-c", code]

    def record(self, cell_id: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / cell_id / "cell.json").read_text())
        return content

    def calls(self, cell_id: str) -> list[dict[str, Any]]:
        """What the stand-in noted of each of its starts."""
        path = self.out / cell_id / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The stand-in on a machine without GPUs."""
    made = Fake(tmp_path)
    monkeypatch.setattr(cells, "DRIVER", str(made.driver))
    monkeypatch.setattr(local, "visible_gpus", list)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return made
