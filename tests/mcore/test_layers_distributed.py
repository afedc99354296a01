"""Megatron-core's layers on two processes: one launch of ``worker.py``, which runs all of its checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import python_path
from tests.mcore import worker
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_checks_on_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.mcore.worker", str(out)],
        cwd=ROOT,
        # no GPU even where there is one: CI's truth is the CPU's
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **python_path()},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads(out.read_text())
    assert list(results) == list(worker.CHECKS)
    failed = {name: fault for name, fault in results.items() if fault}
    assert not failed, "\n\n".join(f"{name}\n{fault}" for name, fault in failed.items())


def test_the_worker_checks_every_recipe() -> None:
    # 16 of stock layers, all recipes, 5 of them again, 2 of own scales, 8 of recompute, 3 of main_grad, 6 by themselves
    assert len(worker.CHECKS) == 16 + len(worker.PLAIN) + 5 + 2 + 8 + 3 + 6
