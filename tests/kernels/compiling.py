"""Modules that compile kernels, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def printed_by(cache: Path, *module: str) -> str:
    """Output of a Python module that compiles kernels."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", *module],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
