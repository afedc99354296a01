"""Weights that tensor-parallel ranks hold copies of stay copies, whatever tilings each rank's kernels were tuned to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.environment import python_path
from tests.training.helpers import REPOSITORY, argv


def run(tmp_path: Path, arguments: list[str], **environment: str) -> dict[str, object]:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(REPOSITORY / "tests/training/replica_worker.py"), str(out), *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **python_path(), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    found: dict[str, object] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_copies_stay_copies_on_cpus(tmp_path: Path) -> None:
    arguments = argv(
        recipe="fp8_delayed", bf16=True, tensor_model_parallel_size=2, train_iters=4, no_save=True, save="run"
    )
    assert run(tmp_path, arguments, CUDA_VISIBLE_DEVICES="") == {"differing": [], "compared": 15}


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_blockwise"])
def test_copies_stay_copies_on_two_gpus(tmp_path: Path, recipe: str) -> None:
    """Biases of linear_proj and linear_fc2 are on both ranks; casts sum their gradients, large enough to be tuned."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, found {torch.cuda.device_count()}")
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "seq_length": 2048, "micro_batch_size": 8}
    arguments = argv(
        **sizes,
        global_batch_size=8,
        recipe=recipe,
        bf16=True,
        tensor_model_parallel_size=2,
        train_iters=8,
        no_save=True,
        save="run",
    )
    assert run(tmp_path, arguments) == {"differing": [], "compared": 15}
