"""Kernels compile for a GPU that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    assert "of 41 kernels compiled" in printed_by(tmp_path, "tests.kernels.compile_only", "90")


@pytest.mark.slow
def test_casts_compile_for_blackwell(tmp_path: Path) -> None:
    """Those have instructions of their own there; ``make test-compile`` compiles all."""
    printed = printed_by(tmp_path, "tests.kernels.compile_only", "100", "casts", "mx_operands")
    assert "_mx_kernel" in printed
    assert "_cast_kernel" in printed


@pytest.mark.slow
def test_instructions_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    chosen = ["--formats", "e2m1", "--kinds", "rht64", "--directions", "rows", "--out", str(file)]
    printed_by(tmp_path / "cache", "tools.bench.instructions", *chosen)
    rows = json.loads(file.read_text())["rows"]
    assert {row["direction"] for row in rows} == {"rows"}
    for row in rows:
        # log2(64) additions, signs, two scales and two additions of the rounding, at least
        assert row["fp32"] >= 6 + 1 + 2 + 2
        assert row["integer"] + row["multiply"] + row["fp32"] + row["memory"] <= row["total"]


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
