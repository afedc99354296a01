"""Converted models under tensor and data parallelism at once: ``mesh_worker.py`` on four processes, once."""

from pathlib import Path

import pytest

from tests.checks import assert_none_failed
from tests.launch import fork_ranks
from tests.linear import mesh_worker
from tests.weekly import checks_of


@pytest.mark.slow
def test_all_checks_on_four_processes(weekly: bool, tmp_path: Path) -> None:
    names, out = checks_of(mesh_worker.CHECKS, mesh_worker.WEEKLY, weekly), tmp_path / "results.json"
    fork_ranks(4, ["-m", "tests.linear.mesh_worker", str(out), *names])
    assert_none_failed(out, names)
    # 3 recipes on DDP and FSDP2, 4 of gathered codes, 2 with recomputation, 2 of replicas, 1 of draws
    assert len(mesh_worker.CHECKS) == 2 * 3 + 4 + 2 + 2 + 1
