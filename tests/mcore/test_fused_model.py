"""A whole GPT through the fused kernels, interpreted and on a GPU; one launch of ``fused_worker.py`` runs all."""

from pathlib import Path

import pytest

from tests.checks import assert_none_failed
from tests.launch import torchrun
from tests.mcore import fused_worker


def run(processes: int, out: Path, **environment: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = torchrun(processes, ["-m", "tests.mcore.fused_worker", str(out)], **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_none_failed(out, fused_worker.CHECKS)


@pytest.mark.slow
def test_interpreted_on_two_processes(tmp_path: Path) -> None:
    run(2, tmp_path / "results.json", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_compiled(tmp_path: Path) -> None:
    run(1, tmp_path / "results.json")
