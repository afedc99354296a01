"""The memory plan beside what a GPU allocates, in whole runs of the driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lowprec.shipped import SHIPPED
from tests.environment import python_path
from tests.training.helpers import REPOSITORY
from tests.waiting import PATIENCE

LLAMA = ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"]
LLAMA += ["--group-query-attention", "--num-query-groups", "4", "--untie-embeddings-and-output-weights"]
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
EXPERTS = ["--num-experts", "8", "--moe-ffn-hidden-size", "1024", "--squared-relu", "--disable-bias-linear"]
CASES = {
    "gpt": [],
    "without dropout": ["--hidden-dropout", "0", "--attention-dropout", "0"],
    "several microbatches": ["--recipe", "mxfp8", "--global-batch-size", "32"],
    "llama": LLAMA,
    "chunks of the loss": [*LLAMA, "--output-layer-chunk-size", "2048"],
    "chunks of a tied loss": ["--output-layer-chunk-size", "2048"],
    "codes of fprop's values": ["--recipe", "quartet2"],
    "recomputed": FULL,
    "experts": [*EXPERTS, "--moe-aux-loss-coeff", "0.01"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_is_allocated(name: str, tmp_path: Path) -> None:
    flags = ["--config", str(SHIPPED / "configs/models/gpt_125m.yaml"), "--mock-data", "--no-save"]
    flags += ["--hidden-dropout", "0.1", "--micro-batch-size", "16", "--global-batch-size", "16", "--train-iters", "4"]
    flags += ["--eval-iters", "0", *CASES[name]]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *flags],
        cwd=tmp_path,
        env={**os.environ, **python_path()},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (planned,) = re.findall(r"memory: ([0-9.]+) GiB planned", done.stdout)
    (allocated,) = re.findall(r"memory: ([0-9.]+) GiB allocated", done.stdout)
    assert float(planned) == pytest.approx(float(allocated), rel=0.1)
