"""The loss by chunks of tokens, on one process and under tensor parallelism on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import assert_none_failed
from tests.launch import fork_ranks
from tests.mcore import chunked_worker

ON_TWO = [name for name in chunked_worker.CHECKS if name != "frozen"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_checks(ranks: int, tmp_path: Path) -> None:
    names = ON_TWO if ranks == 2 else [name for name in chunked_worker.CHECKS if "sequence-parallel" not in name]
    out = tmp_path / "results.json"
    fork_ranks(ranks, ["-m", "tests.mcore.chunked_worker", str(out), *names])
    assert_none_failed(out, names)
