"""--moe-fp8-dispatch on two processes: one launch of ``dispatch_worker.py``, which runs all of its checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.environment import ROOT, python_path
from tests.waiting import PATIENCE


def run(out: Path, **environment: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.mcore.dispatch_worker", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **python_path(), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads(out.read_text())
    assert results
    failed = {name: fault for name, fault in results.items() if fault}
    assert not failed, "\n\n".join(f"{name}\n{fault}" for name, fault in failed.items())


@pytest.mark.slow
def test_tokens_travel_as_codes(tmp_path: Path) -> None:
    run(tmp_path / "results.json", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_native_over_nccl(tmp_path: Path) -> None:
    run(tmp_path / "results.json")
