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
from tests.waiting import ended, wait_for


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
    code, printed = fake.stopped_by(number, path)
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
    path = write_sweep(recipes=["bf16"], resources={"processes_per_job": 2})
    code, printed = fake.stopped_by(signal.SIGTERM, path, processes=2)
    assert code == 75, printed
    assert fake.calls(BF16)[0]["WORLD_SIZE"] == "2"
    assert (fake.record(BF16)["state"], fake.record(BF16)["exit_code"]) == ("interrupted", 0)
    assert (fake.out / BF16 / "log.txt").read_text().count("saved") == 2


@pytest.mark.slow
def test_a_job_without_handlers_gets_the_signal_again(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.behave(bf16="deaf")
    code, printed = fake.stopped_by(signal.SIGTERM, write_sweep(recipes=["bf16"]))
    assert code == 75, printed
    assert printed.count("to save") == 1, "it says so once"
    assert (fake.record(BF16)["state"], fake.record(BF16)["iteration"]) == ("interrupted", 3)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--set", "train-iters=5"], ["--evaluate=hold"]], ids=["training", "scoring"])
def test_a_job_that_dies_of_the_sweep_s_signal_has_not_failed(
    fake: Fake, write_sweep: WriteSweep, flags: list[str]
) -> None:
    """Slurm signals all processes of a task, also those without a handler."""
    if "--set" in flags:
        fake.behave(bf16="hold")
    path = write_sweep(recipes=["bf16"])
    sweep = fake.start(path, *flags)
    fake.wait_until_held(BF16)
    sweep.process.send_signal(signal.SIGSTOP)
    os.kill(pid := int((fake.out / BF16 / "holding.0").read_text()), signal.SIGUSR1)
    wait_for(lambda: ended(pid), "the end of the job")
    sweep.process.send_signal(signal.SIGUSR1)
    sweep.process.send_signal(signal.SIGCONT)
    code, printed = sweep.ended()
    assert code == 75, printed
    assert (fake.out / BF16 / "requeue").read_text().startswith("SIGUSR1 at iteration ")
    assert fake.record(BF16)["state"] == ("interrupted" if "--set" in flags else "done")


@pytest.mark.slow
def test_scoring_by_torchrun_ends_at_a_signal(fake: Fake, write_sweep: WriteSweep) -> None:
    """Its processes ignore SIGTERM and SIGUSR1."""
    path = write_sweep(recipes=["bf16"], resources={"processes_per_job": 2})
    code, printed = fake.stopped_by(signal.SIGTERM, path, "--evaluate=hold", processes=2)
    assert code == 75, printed
    assert (fake.out / BF16 / "requeue").read_text() == "SIGTERM at iteration 4\n"
    assert fake.run(path, "--evaluate=") == 0, "it is trained"


@pytest.mark.slow
def test_a_save_that_fails_after_a_signal_is_a_failure(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.behave(bf16="full")
    code, printed = fake.stopped_by(signal.SIGTERM, write_sweep(recipes=["bf16"]))
    assert code == 1, printed
    assert "No space left on device" in printed
    assert (fake.record(BF16)["state"], fake.record(BF16)["exit_code"]) == ("failed", 2)
    assert not (fake.out / BF16 / "requeue").exists()


@pytest.mark.slow
def test_a_signal_in_the_last_save_leaves_the_scores_to_the_next_start(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.behave(bf16="hold")
    path = write_sweep(recipes=["bf16"], evaluate="--wikitext")
    code, printed = fake.stopped_by(signal.SIGUSR1, path, "--set", "train-iters=3")
    assert code == 75, printed
    assert fake.record(BF16)["state"] == "done"
    assert (fake.out / BF16 / "requeue").read_text() == "SIGUSR1 at iteration 3\n"
    assert fake.run(path, "--status") == 0
    assert "1 unscored" in capsys.readouterr().out
    assert fake.run(path, "--status", "--evaluate=") == 0
    assert "1 done" in capsys.readouterr().out
    assert fake.run(path, "--set", "train-iters=3", "--evaluate=") == 0
    assert not (fake.out / BF16 / "requeue").exists(), "nothing is left"
    code, printed = fake.start(path, "--set", "train-iters=3").ended()
    assert code == 0, printed
    assert not (fake.out / BF16 / "requeue").exists()
    assert (fake.out / BF16 / "evaluation.json").exists()
    assert len(fake.calls(BF16)) == 1, "not trained again"
    assert fake.run(path, "--status") == 0
    assert "1 done" in capsys.readouterr().out
