"""Weights that tensor-parallel ranks hold copies of stay copies, whatever tilings each rank's kernels were tuned to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.launch import fork_ranks, torchrun
from tests.training.helpers import argv

COMMAND = ["tests/training/replica_worker.py", "out.json"]


def found(folder: Path) -> object:
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
def test_copies_stay_copies_on_cpus(tmp_path: Path) -> None:
    arguments = argv(
        recipe="fp8_delayed", bf16=True, tensor_model_parallel_size=2, train_iters=4, no_save=True, save="run"
    )
    fork_ranks(2, [*COMMAND, *arguments], tmp_path)
    assert found(tmp_path) == {"differing": [], "compared": 15}


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
    done = torchrun(2, [*COMMAND, *arguments], tmp_path)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert found(tmp_path) == {"differing": [], "compared": 15}
