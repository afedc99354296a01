"""--manual-gc: when garbage is collected, and that Python does not collect in between."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from megatron_lowprec.training import loop
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.manual_gc import ManualGc
from tests.training.conftest import Drive
from tests.training.helpers import argv


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Generations that were collected on request."""
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: found.append(generation))
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"manual_gc": True}, [2, 2, 0]),
        ({"manual_gc": True, "manual_gc_interval": 2}, [2, 2, 2, 2, 0]),
        ({"manual_gc": True, "manual_gc_interval": 3, "no_manual_gc_eval": True}, [2, 2]),
    ],
    ids=str,
)
def test_garbage_is_collected_at_the_configured_steps(
    collections: list[int], options: dict[str, Any], expected: list[int]
) -> None:
    """At the start, in the iterations of the interval, and around an evaluation."""
    with ManualGc(Config(**options)) as garbage:
        assert gc.isenabled() is not options.get("manual_gc", False)
        for iteration in range(1, 5):
            garbage.after(iteration)
        with garbage.evaluation():
            pass
    assert gc.isenabled()
    assert collections == expected


def test_a_run_collects_at_its_iterations(
    drive: Drive, collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled, original = [], loop.train_step

    def recording(*arguments: Any) -> Any:
        enabled.append(gc.isenabled())
        collections.append(-1)
        return original(*arguments)

    monkeypatch.setattr(loop, "train_step", recording)
    options = {"train_iters": 3, "eval_iters": 1, "eval_interval": 2, "no_save": True}
    drive(argv(save="out", manual_gc=True, manual_gc_interval=2, **options))
    assert enabled == [False] * 3
    assert gc.isenabled()
    begin = collections.index(-1) - 1
    # start, two steps, the interval's, around a validation, one step, around the last validation and the test
    assert collections[begin:][:12] == [2, -1, -1, 2, 2, 0, -1, 2, 0, 2, 0]
