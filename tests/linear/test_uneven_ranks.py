"""Two ranks of which one calls a converted model, or loads it, alone: ``uneven_worker.py`` runs all checks."""

from pathlib import Path

import pytest

from tests.checks import assert_none_failed
from tests.launch import fork_ranks
from tests.linear import uneven_worker


@pytest.mark.slow
def test_all_checks_on_two_ranks(tmp_path: Path) -> None:
    names, out = list(uneven_worker.CHECKS), tmp_path / "results.json"
    fork_ranks(2, ["-m", "tests.linear.uneven_worker", str(out), *names])
    assert_none_failed(out, names)
