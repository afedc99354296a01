"""Signals: jobs save, and the same command goes on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lowprec.sweep import cli, local
from megatron_lowprec.sweep.view import View
from tests.sweep.conftest import BF16, MXFP4, Fake, WriteSweep
from tests.waiting import ended


def test_waiting_for_a_job_fails_when_its_sweep_has_died(fake: Fake) -> None:
    fake.launch([sys.executable, "-c", "raise SystemExit('broken')"])
    with pytest.raises(AssertionError, match=r"exit code 1 before .* at iteration 2: broken"):
        fake.wait_until_held(BF16)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_lets_jobs_save_and_the_same_command_goes_on(
    fake: Fake, write_sweep: WriteSweep, number: signal.Signals
) -> None:
    fake.behave(bf16="hold")
    path = write_sweep()
    sweep = fake.start(path)
    fake.wait_until_held(BF16)
    sweep.process.send_signal(number)
    code, printed = sweep.ended()
    assert code == cli.TO_BE_CONTINUED == 75, printed
    assert f"{number.name}: waiting for {BF16} to save" in printed
    assert f"stopped by {number.name}; the same command goes on where it stopped" in printed
    record = fake.record(BF16)
    assert (record["state"], record["iteration"]) == ("interrupted", 3)
    assert "saved" in (fake.out / BF16 / "log.txt").read_text()
    assert (fake.out / BF16 / "requeue").read_text().startswith(number.name)
    assert not fake.calls(MXFP4)
    fake.behave()
    assert fake.run(path) == 0
    assert [call["begun"] for call in fake.calls(BF16)] == [0, 3]


@pytest.mark.slow
def test_a_second_ctrl_c_kills(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.behave(bf16="hold")
    fake.constants["_TWICE"] = 0.0
    sweep = fake.start(write_sweep(recipes=["bf16"]))
    fake.wait_until_held(BF16)
    pid = fake.calls(BF16)[0]["pid"]
    os.kill(pid, signal.SIGSTOP)  # it hears nothing
    sweep.process.send_signal(signal.SIGINT)
    sweep.wait_for("to save")
    sweep.process.send_signal(signal.SIGINT)
    code, printed = sweep.ended()
    assert code == cli.TO_BE_CONTINUED, printed
    assert ended(pid)


def test_a_ctrl_c_that_a_program_between_passes_on_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(local, "time", clock)
    runner = local.Runner(tmp_path, [], View(tmp_path, []), rerun=False, max_failures=None)
    kills = []
    for clock.now in (100.0, 100.5, 101.0, 101.5):
        runner._on_signal(signal.SIGINT, None)
        kills.append(runner._kill_asked)
    assert kills == [False, False, False, True]


@pytest.mark.slow
def test_workers_of_torchrun_get_the_signal(fake: Fake, write_sweep: WriteSweep) -> None:
    """torchrun kills its workers half a minute after a SIGTERM of its own, and exits with 1."""
    fake.behave(bf16="hold")
    sweep = fake.start(write_sweep(recipes=["bf16"], resources={"processes_per_job": 2}))
    fake.wait_until_held(BF16, processes=2)
    sweep.process.send_signal(signal.SIGTERM)
    code, printed = sweep.ended()
    assert code == 75, printed
    assert fake.calls(BF16)[0]["WORLD_SIZE"] == "2"
    assert (fake.record(BF16)["state"], fake.record(BF16)["exit_code"]) == ("interrupted", 0)
    assert (fake.out / BF16 / "log.txt").read_text().count("saved") == 2


@pytest.mark.slow
def test_a_job_without_handlers_gets_the_signal_again(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.behave(bf16="deaf")
    sweep = fake.start(write_sweep(recipes=["bf16"]))
    fake.wait_until_held(BF16)
    sweep.process.send_signal(signal.SIGTERM)
    code, printed = sweep.ended()
    assert code == 75, printed
    assert printed.count("to save") == 1, "it says so once"
    assert (fake.record(BF16)["state"], fake.record(BF16)["iteration"]) == ("interrupted", 3)
