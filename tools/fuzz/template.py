"""A small run, whose files the fuzz damages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED

_FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2
--global-batch-size 4 --lr 1e-3 --train-iters 4 --eval-iters 1 --eval-interval 2 --log-interval 1
--tokenizer-type NullTokenizer --vocab-size 255 --lr-decay-iters 4 --no-self-test --recipe fp8_delayed
--log-quantization-interval 2 --capture-step 1 --capture-layers *1.mlp.linear_fc1 --save-interval 2"""
TINY = tuple(_FLAGS.split())


def template(folder: Path) -> Path:
    """A run with two checkpoints, snapshots and captured operands, and its model as Hugging Face stores it."""
    folder = folder.resolve()
    if (folder / "hf").exists():
        return folder
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for command in (
        ["-m", "megatron_lowprec.training.driver", *TINY, "--mock-data", "--save", str(folder / "run")],
        ["-m", "megatron_lowprec", "export", "--load", str(folder / "run"), "--out", str(folder / "hf")],
    ):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=SHIPPED.parent,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UserError(f"the small run failed: {done.stderr.strip()}")
    if not (folder / "hf").exists():
        raise UserError("the small run was not exported: no hf folder was written")
    shutil.rmtree(folder / "run" / "tensorboard", ignore_errors=True)
    return folder
