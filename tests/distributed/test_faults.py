"""A killed rank and signals under torchrun; ``make test-fault-injection`` injects all faults and compares losses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE, PATIENT_TORCHRUN
from tools.fault_injection.run import REPOSITORY, Run, newest, rows
from tools.fault_injection.scenarios import MODEL

# Only the test ends it.
ENDLESS = [*MODEL, "--train-iters", "1000000", "--distributed-timeout-minutes", "1440"]
PATIENT = REPOSITORY / "tests" / "distributed" / "patient_driver.py"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Run]]:
    monkeypatch.setenv(*PATIENT_TORCHRUN)
    started: list[Run] = []
    yield started
    for run in started:
        run.kill_all()


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_a_signal_to_one_saves(tmp_path: Path, runs: list[Run]) -> None:
    save, options = tmp_path / "out", [*ENDLESS, "--num-workers", "1"]
    killed = Run(save, options, PATIENT)
    runs.append(killed)
    killed.wait_for_iteration(12)
    killed.kill_rank(1)
    killed.ended()
    assert killed.left_over(PATIENCE) == 0
    # The killed rank is the root cause; the other one exits with a single line.
    assert "Signal 9 (SIGKILL)" in killed.printed.rpartition("Root Cause")[2]
    assert "pretrain_gpt.py: rank 0: stopped, for" in killed.printed
    assert "[rank 0] Traceback" not in killed.printed

    again = Run(save, options, PATIENT)
    runs.append(again)
    again.wait_for_iteration(15)
    assert "continuing from it" in again.printed
    again.ranks()[1].send_signal(signal.SIGUSR1)
    code, _ = again.ended()
    assert code == 0
    assert again.left_over(PATIENCE) == 0
    request = (save / "requeue").read_text()
    assert request == f"SIGUSR1 at iteration {newest(save)}\n"
    assert [row["iteration"] for row in rows(save) if "lm loss" in row] == list(range(1, newest(save) + 1))


BUILDING = """
import os, pathlib, sys
import pretrain_gpt
from megatron_lowprec.training import model
from megatron_lowprec.training.distributed import startup
from tests.waiting import wait_for

def build(*_):
    pathlib.Path(__file__).with_name("building " + os.environ["RANK"]).touch()
    wait_for(lambda: False, "a signal")

model.build = build
if __name__ == "__main__":
    startup.leave(pretrain_gpt.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_while_a_run_starts_ends_it(tmp_path: Path, runs: list[Run]) -> None:
    script = tmp_path / "building.py"
    script.write_text(BUILDING)
    run = Run(tmp_path / "out", ENDLESS, script)
    runs.append(run)
    run.wait(lambda: all((tmp_path / f"building {rank}").exists() for rank in range(2)), "ranks that build the model")
    run.send(signal.SIGTERM)
    run.ended()
    assert run.left_over(PATIENCE) == 0
    assert not rows(tmp_path / "out")
    assert (tmp_path / "out" / "requeue").read_text() == "SIGTERM before the first step\n"
