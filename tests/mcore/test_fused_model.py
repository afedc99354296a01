"""A whole GPT through the fused kernels, interpreted and on a GPU; one launch of ``fused_worker.py`` runs all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import python_path
from tests.mcore import fused_worker
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def run(processes: int, out: Path, **environment: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, "-m", "tests.mcore.fused_worker", str(out)],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **python_path(),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads(out.read_text())
    assert list(results) == list(fused_worker.CHECKS)
    failed = {name: fault for name, fault in results.items() if fault}
    assert not failed, "\n\n".join(f"{name}\n{fault}" for name, fault in failed.items())


@pytest.mark.slow
def test_interpreted_on_two_processes(tmp_path: Path) -> None:
    run(2, tmp_path / "results.json", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_compiled(tmp_path: Path) -> None:
    run(1, tmp_path / "results.json")
