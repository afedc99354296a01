"""Converted models under DistributedDataParallel and fully_shard: ``convert_worker.py`` on two processes, once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import ROOT, python_path
from tests.linear import convert_worker
from tests.waiting import PATIENCE


@pytest.mark.slow
def test_all_checks_on_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.linear.convert_worker", str(out)],
        cwd=ROOT,
        # no GPU even where there is one: CI's truth is the CPU's
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **python_path()},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads(out.read_text(encoding="utf-8"))
    assert list(results) == list(convert_worker.CHECKS)
    failed = {name: fault for name, fault in results.items() if fault}
    assert not failed, "\n\n".join(f"{name}\n{fault}" for name, fault in failed.items())


def test_the_worker_has_all_checks() -> None:
    # 5 recipes and 2 with recomputation on both wrappers, 1 of GPT-2's form, 8 of an FP8 all-gather, 4 of a state dict,
    # 4 by themselves
    assert len(convert_worker.CHECKS) == 2 * (5 + 2) + 1 + 8 + 4 + 4
