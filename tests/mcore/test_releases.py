"""One behaviour under every release of Megatron-core."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core import parallel_state, utils

from megatron_lowprec.mcore import releases


def test_a_batch_is_sliced_over_context_parallel_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.18 on the function takes a missing group for all ranks, and halves the sequences of two replicas."""
    group, given = object(), list[Any]()
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda *_, **__: group)
    monkeypatch.setattr(utils, "get_batch_on_this_cp_rank", lambda batch, **options: given.append(options) or batch)
    assert releases.batch_on_this_cp_rank({"tokens": None}) == {"tokens": None}
    assert [options["cp_group"] for options in given] == [group]
    assert set(given[0]) == {"cp_group", *releases._CP_OPTIONS}
