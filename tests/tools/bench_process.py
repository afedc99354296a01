"""tools.bench on a CPU: its environment in this process, or a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.waiting import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``--device cpu`` sets must not reach other tests of this process."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    return subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", "tools.bench", *arguments, "--device", "cpu"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
