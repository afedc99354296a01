"""Triton kernels on a CPU: the cases of a module under Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets. A module of cases has ``differences(device)``, which compares
kernels with a reference and returns what is wrong; it calls ``main`` where it is run by itself.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


def assert_no_differences(module: str) -> str:
    """Run ``module`` interpreted, and what it prints; skips where Triton is not installed."""
    pytest.importorskip("triton", reason="triton is not installed")
    run = subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "compared" in run.stdout
    return run.stdout


def steps_of(module: Any, device: str) -> float:
    """How many steps of its format a rounded result may be off: the interpreter cuts fp32 to bf16, a GPU rounds."""
    return 1.0 if device == "cpu" and module.__name__.endswith(".triton") else 0.5


def main(differences: Callable[[str], tuple[int, list[str]]]) -> None:
    """Print what differs and how many cases were compared; the exit code says whether anything did."""
    os.environ["TRITON_INTERPRET"] = "1"
    compared, found = differences("cpu")
    print(*found, f"{compared} compared", sep="\n")
    sys.exit(bool(found) or not compared)
