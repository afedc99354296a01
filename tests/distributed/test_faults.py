"""What happens to a run under torchrun from outside; ``make test-faults`` does all of it, and compares losses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.faults.run import Run, newest, rows
from tools.faults.scenarios import MODEL


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.kill_all()


def test_a_killed_rank_ends_the_others_and_a_signal_to_one_saves(tmp_path: Path, runs: list[Run]) -> None:
    save, options = tmp_path / "out", [*MODEL, "--train-iters", "1000", "--num-workers", "1"]
    killed = Run(save, options)
    runs.append(killed)
    killed.wait_for_iteration(12)
    killed.kill_rank(1)
    _, seconds = killed.ended()
    assert seconds < 60
    assert killed.left_over() == 0
    # The one that died is the root cause; the other says in a line that it was not its own fault.
    assert "Signal 9 (SIGKILL)" in killed.printed.rpartition("Root Cause")[2]
    assert "pretrain_gpt.py: rank 0: stopped, for" in killed.printed
    assert "[rank 0] Traceback" not in killed.printed

    again = Run(save, options)
    runs.append(again)
    again.wait_for_iteration(15)
    assert "continuing from it" in again.printed
    again.ranks()[1].send_signal(signal.SIGUSR1)
    code, _ = again.ended()
    assert code == 0
    assert again.left_over() == 0
    request = (save / "requeue").read_text()
    assert request == f"SIGUSR1 at iteration {newest(save)}\n"
    assert [row["iteration"] for row in rows(save) if "lm loss" in row] == list(range(1, newest(save) + 1))


def test_a_signal_while_a_run_starts_ends_it(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path / "out", [*MODEL, "--train-iters", "1000"])
    runs.append(run)
    run.wait(lambda: run.listen(signal.SIGTERM), "ranks that listen", poll=0.01)
    run.send(signal.SIGTERM)
    _, seconds = run.ended()
    # a rank that is in torch's C++ code hears nothing; torchrun ends it half a minute later
    assert seconds < 45
    assert run.left_over() == 0
    assert not rows(tmp_path / "out")
    assert (tmp_path / "out" / "requeue").read_text() == "SIGTERM before the first step\n"
