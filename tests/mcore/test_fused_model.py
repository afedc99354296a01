"""A whole GPT through the fused kernels, interpreted and on a GPU; one launch of ``fused_worker.py`` runs all."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checks import assert_none_failed
from tests.launch import torchrun
from tests.mcore import fused_worker
from tests.weekly import checks_of

WEEKLY = {
    "same-gpt-qk-norms",
    "same-llama-qk-norms",
    "fusions-qk-norms",
    "fusions-current",
    "residuals-recomputed",
    "saved-memory-fp8_delayed-gpt",
}


def run(names: Sequence[str], out: Path, **environment: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = torchrun(1, ["-m", "tests.mcore.fused_worker", str(out), *names], **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_none_failed(out, names)


@pytest.mark.slow
def test_interpreted(weekly: bool, tmp_path: Path) -> None:
    """But for the parallel checks, which test_fp8_gather.py runs on two processes."""
    names = checks_of([name for name in fused_worker.CHECKS if name not in fused_worker.PARALLEL], WEEKLY, weekly)
    run(names, tmp_path / "results.json", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_compiled(tmp_path: Path) -> None:
    run(list(fused_worker.CHECKS), tmp_path / "results.json")
