"""--moe-fp8-dispatch on two processes: one launch of ``dispatch_worker.py``, which runs all of its checks."""

from pathlib import Path

import pytest
import torch

from tests.checks import assert_none_failed
from tests.launch import fork_ranks, torchrun

COMMAND = ["-m", "tests.mcore.dispatch_worker"]


@pytest.mark.slow
def test_tokens_travel_as_codes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    fork_ranks(2, [*COMMAND, str(out)])
    assert_none_failed(out)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_native_over_nccl(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = torchrun(2, [*COMMAND, str(out)])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_none_failed(out)
