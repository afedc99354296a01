"""Where jobs run: GPUs and cores of this machine, each with its share."""

from __future__ import annotations

import os
import subprocess

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.sweep import local
from megatron_lowprec.sweep.spec import Resources
from tests.sweep.conftest import BF16, MXFP4, Fake, WriteSweep


def test_gpus_one_each_shared_or_several() -> None:
    one = local.places(Resources(), ["0", "1"], cores=8)
    assert [(place.gpus, place.processes, place.threads) for place in one] == [(("0",), 1, 4), (("1",), 1, 4)]
    shared = local.places(Resources(jobs_per_gpu=2), ["0", "1"], cores=8)
    assert [place.gpus for place in shared] == [("0",), ("1",), ("0",), ("1",)]
    several = local.places(Resources(gpus_per_job=2), ["0", "2", "3", "5", "7"], cores=8)
    assert [(place.gpus, place.processes, place.threads) for place in several] == [
        (("0", "2"), 2, 2),
        (("3", "5"), 2, 2),
    ]
    assert len(local.places(Resources(jobs_at_once=1), ["0", "1"], cores=8)) == 1


def test_cores_where_there_are_no_gpus() -> None:
    assert local.places(Resources(), [], cores=8) == [local.Place((), 1, 8)]
    assert local.places(Resources(processes_per_job=2, jobs_at_once=2), [], cores=8) == [local.Place((), 2, 2)] * 2
    assert local.places(Resources(jobs_at_once=4), [], cores=2)[0].threads == 1
    with pytest.raises(UserError, match=r"a job needs 2 GPUs \(gpus_per_job\), found 1"):
        local.places(Resources(gpus_per_job=2), ["0"], cores=8)


def test_the_gpus_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        returncode, stdout, stderr = 0, "2\n", ""

    monkeypatch.setattr(subprocess, "run", lambda *args, **more: Asked)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1234")
    assert local.visible_gpus() == ["5", "GPU-1234"]


@pytest.mark.slow
def test_each_job_sees_its_own_gpu(
    fake: Fake, write_sweep: WriteSweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "visible_gpus", lambda: ["0", "1", "3"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fake.behave(bf16="meet", mxfp4="meet")
    path = write_sweep(seeds=[1, 2], resources={"gpus_per_job": 1})
    assert fake.run(path, "--gpus", "1,3") == 0
    calls = [fake.calls(f"gpt_tiny-{recipe}-s{seed}")[0] for recipe in ("bf16", "mxfp4") for seed in (1, 2)]
    assert sorted(call["CUDA_VISIBLE_DEVICES"] for call in calls) == ["1", "1", "3", "3"]
    assert {call["OMP_NUM_THREADS"] for call in calls} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert max(call["at_once"] for call in calls) == 2
    capsys.readouterr()
    assert fake.run(path, "--gpus", "2") == 2
    assert "there is no GPU 2 here" in capsys.readouterr().err


@pytest.mark.slow
def test_jobs_at_once_on_a_cpu(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.behave(bf16="meet", mxfp4="meet")
    assert fake.run(write_sweep(), "--jobs-at-once", "2") == 0
    assert max(call["at_once"] for call in (*fake.calls(BF16), *fake.calls(MXFP4))) == 2
