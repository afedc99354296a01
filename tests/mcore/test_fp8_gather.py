"""--fp8-sequence-parallel-gather, and fused kernels, on two processes: one launch of ``gather_worker.py`` runs all."""

from pathlib import Path

import pytest
import torch

from tests.checks import assert_none_failed
from tests.launch import torchrun
from tests.mcore import gather_worker
from tests.weekly import checks_of

WEEKLY = {
    "fp8_lm-llama",
    "bytes-llama",
    "recomputed-mlp",
    "recomputed-bytes",
    "powers-of-two",
    "float32",
    "anomaly-detection",
    "fusions-llama-tp",
    "dropout-gpt-sp",
}


def run(out: Path, names: list[str], **environment: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = torchrun(2, ["-m", "tests.mcore.gather_worker", str(out), *names], **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_none_failed(out, names)


@pytest.mark.slow
def test_emulated_and_interpreted(weekly: bool, tmp_path: Path) -> None:
    names = checks_of(gather_worker.CHECKS | gather_worker.PARALLEL, WEEKLY, weekly)
    run(tmp_path / "results.json", names, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_native_over_nccl(tmp_path: Path) -> None:
    run(tmp_path / "results.json", list(gather_worker.CHECKS))
