"""Megatron-core's layers on two processes: one launch of ``worker.py``, which runs all of its checks."""

from pathlib import Path

import pytest

from tests.checks import assert_none_failed
from tests.launch import fork_ranks
from tests.mcore import worker


@pytest.mark.slow
def test_all_checks_on_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    fork_ranks(2, ["-m", "tests.mcore.worker", str(out)])
    assert_none_failed(out, worker.CHECKS)


def test_the_worker_checks_every_recipe() -> None:
    # 16 of stock layers, all recipes but those with phases, 6 of them again, 2 of own scales, 8 of recompute, 3 of
    # main_grad, 6 by themselves
    assert len(worker.CHECKS) == 16 + len(worker.PLAIN) + 6 + 2 + 8 + 3 + 6
