"""A job that another sweep runs, or has left to run, is started once."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_lowprec.sweep.job_record import Lock
from tests.sweep.conftest import BF16, Fake, WriteSweep
from tests.waiting import ended, wait_for


@pytest.mark.slow
def test_two_sweeps_run_each_job_once(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.behave(bf16="hold", mxfp4="hold")
    path = write_sweep(seeds=[1, 2, 3])
    sweeps = [fake.start(path) for _ in range(2)]
    # both begin with the first job, so one has found it taken and begun the next
    wait_for(lambda: len(list(fake.out.glob("*/holding.0"))) == 2, "a job of each sweep")
    fake.release()
    ends = [sweep.ended() for sweep in sweeps]
    # 1 if the other's last job was still running
    assert all(code == ("not finished: " in printed) for code, printed in ends), ends
    assert "left to process" in "".join(printed for _, printed in ends)
    ids = [f"gpt_tiny-{recipe}-s{seed}" for recipe in ("bf16", "mxfp4") for seed in (1, 2, 3)]
    assert [len(fake.calls(name)) for name in ids] == [1] * 6
    assert {fake.record(name)["state"] for name in ids} == {"done"}


@pytest.mark.slow
def test_a_job_outlives_a_killed_sweep_and_is_not_started_twice(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.behave(bf16="hold")
    path = write_sweep(recipes=["bf16"])
    sweep = fake.start(path)
    fake.wait_until_held(BF16)
    pid = fake.calls(BF16)[0]["pid"]
    sweep.process.kill()
    sweep.ended()
    assert not ended(pid)
    assert fake.run(path) == 1, "a job has not finished"
    printed = capsys.readouterr().out
    assert f"{BF16}: left to process {pid} on " in printed, "the killed sweep holds nothing"
    assert f"not finished: {BF16}; another process runs" in printed
    assert len(fake.calls(BF16)) == 1
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: ended(pid), "the end of the job")
    fake.behave()
    assert fake.run(path) == 0
    assert (fake.record(BF16)["state"], len(fake.calls(BF16))) == ("done", 2)


@pytest.mark.slow
def test_one_job_that_another_process_runs_is_an_error(fake: Fake, write_sweep: WriteSweep) -> None:
    path = write_sweep()
    fake.run(path, "--only", "mxfp4")
    assert Lock(fake.out, BF16).acquire() is None
    assert fake.run(path, "--job", "0") == 1
    assert fake.run(path) == 1, "a whole sweep leaves it to the other"
    assert not fake.calls(BF16)
