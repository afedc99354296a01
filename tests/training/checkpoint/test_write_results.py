"""Checkpoint writers in forked processes report through shared memory."""

from __future__ import annotations

import os
import queue

import pytest

from megatron_lowprec.training.checkpoint.write_results import WriteResults


def put_in_a_fork(results: WriteResults, *items: object) -> None:
    child = os.fork()
    if child == 0:
        for item in items:
            results.put(item)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_process_reports_in_order() -> None:
    results = WriteResults()
    large = {0: list(range(100_000))}  # more than a pipe holds
    put_in_a_fork(results, large, "second")
    results.put("own")
    assert [results.get_nowait() for _ in range(3)] == [large, "second", "own"]
    put_in_a_fork(results, "next save")
    assert results.get_nowait() == "next save"


def test_a_writer_that_died_has_reported_nothing() -> None:
    with pytest.raises(queue.Empty):
        WriteResults().get_nowait()
