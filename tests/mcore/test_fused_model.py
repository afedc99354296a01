"""A whole GPT through the fused kernels, interpreted and on a GPU; one launch of ``fused_worker.py`` runs all."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checks import assert_none_failed
from tests.launch import torchrun
from tests.mcore import fused_worker
from tests.weekly import checks_of

PARALLEL = [name for name in fused_worker.CHECKS if name.endswith(("-sp", "-tp"))]
"""Checks of sequence and tensor parallel models. The others do the same on each rank."""

WEEKLY = {
    "same-gpt-qk-norms",
    "same-llama-qk-norms",
    "fusions-qk-norms",
    "fusions-current",
    "fusions-llama-tp",
    "dropout-gpt-sp",
    "residuals-recomputed",
    "saved-memory-fp8_delayed-gpt",
}


def run(processes: int, names: Sequence[str], out: Path, **environment: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = torchrun(processes, ["-m", "tests.mcore.fused_worker", str(out), *names], **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_none_failed(out, names)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_interpreted(processes: int, weekly: bool, tmp_path: Path) -> None:
    checks = checks_of(fused_worker.CHECKS, WEEKLY, weekly)
    names = [name for name in checks if (name in PARALLEL) == (processes == 2)]
    run(processes, names, tmp_path / "results.json", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_compiled(tmp_path: Path) -> None:
    run(1, list(fused_worker.CHECKS), tmp_path / "results.json")
