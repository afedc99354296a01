"""Jobs on this machine, with the stand-in for the driver; one real job at the end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.sweep import cli, job_record, local
from megatron_lowprec.sweep.job_record import Lock, Record
from megatron_lowprec.sweep.spec import Resources
from megatron_lowprec.sweep.view import View
from tests.sweep.conftest import Fake, WriteSweep
from tests.waiting import ended, wait_for

BF16, MXFP4 = "gpt_tiny-bf16-s1", "gpt_tiny-mxfp4-s1"


# ---- outcomes


@pytest.mark.slow
def test_finished_jobs_are_never_repeated(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep()
    assert fake.run(path) == 0
    record = fake.record(BF16)
    assert (record["state"], record["exit_code"], record["iteration"], record["attempts"]) == ("done", 0, 4, 1)
    assert record["seconds"] > 0
    assert "bf16 from 0" in (fake.out / BF16 / "log.txt").read_text()
    manifest = json.loads((fake.out / "sweep.json").read_text())
    assert [job["run"] for job in manifest["cells"]] == [BF16, MXFP4]
    assert not list((fake.out / "locks").glob("[!.]*"))
    capsys.readouterr()
    assert fake.run(path) == 0
    assert "2 jobs, 2 of them done before, in " in capsys.readouterr().out
    assert (len(fake.calls(BF16)), fake.record(BF16)) == (1, record)


@pytest.mark.slow
def test_missing_data_starts_no_job(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, prefix = write_sweep(), str(tmp_path / "corpus")
    assert fake.run(path, "--data-path", prefix) == 2
    assert f"{BF16}: data path {prefix}: no such file, nor {prefix}.idx" in capsys.readouterr().err
    assert not fake.out.exists()
    Path(f"{prefix}.idx").write_text("")
    assert fake.run(path, "--data-path", prefix) == 0


@pytest.mark.slow
def test_a_failed_job_is_tried_again_from_its_checkpoint(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.behave(bf16="fail_once")
    path = write_sweep()
    assert fake.run(path) == 1
    assert (fake.record(BF16)["state"], fake.record(BF16)["exit_code"]) == ("failed", 1)
    assert fake.record(MXFP4)["state"] == "done", "the others go on"
    printed = capsys.readouterr().out
    assert f"{BF16}: failed with exit code 1 at iteration 2" in printed
    assert "    something is wrong" in printed
    assert fake.run(path) == 0
    assert [call["begun"] for call in fake.calls(BF16)] == [0, 2]
    assert fake.record(BF16)["attempts"] == 2
    assert len(fake.calls(MXFP4)) == 1
    assert "attempt 2" in (fake.out / BF16 / "log.txt").read_text()


@pytest.mark.slow
def test_exit_code_0_before_the_end_is_not_the_end(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.behave(bf16="short")
    path = write_sweep(recipes=["bf16"])
    fake.run(path)
    assert fake.record(BF16)["state"] == "interrupted"
    assert not (fake.out / BF16 / "requeue").exists(), "no other start was requested"
    assert fake.run(path) == 0
    assert fake.record(BF16)["state"] == "done"


@pytest.mark.slow
def test_a_job_with_a_requeue_file_is_not_finished(fake: Fake, write_sweep: WriteSweep) -> None:
    fake.behave(bf16="requeue")
    path = write_sweep(recipes=["bf16"])
    fake.run(path)
    assert (fake.record(BF16)["state"], fake.record(BF16)["exit_code"]) == ("interrupted", 1)
    assert (fake.out / BF16 / "requeue").exists()
    assert fake.run(path) == 0
    assert not (fake.out / BF16 / "requeue").exists()
    assert [call["begun"] for call in fake.calls(BF16)] == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "state"),
    [
        ((0, False, False, 4, 4), "done"),
        ((0, True, False, 4, 4), "done"),
        ((0, False, True, 4, 4), "interrupted"),  # its last evaluation is missing
        ((0, False, False, 3, 4), "interrupted"),
        ((1, False, True, 3, 4), "interrupted"),
        ((-15, True, False, 3, 4), "interrupted"),
        ((1, False, False, 4, 4), "failed"),
        ((-9, False, False, 0, 4), "failed"),
    ],
)
def test_outcomes(arguments: tuple[int, bool, bool, int, int], state: str) -> None:
    assert local.outcome(*arguments) == state


@pytest.mark.slow
def test_max_failures_starts_no_more(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    fake.behave(bf16="fail", mxfp4="fail")
    assert fake.run(write_sweep(seeds=[1, 2]), "--max-failures", "2") == 1
    assert "2 failed, 2 waiting" in capsys.readouterr().out


@pytest.mark.slow
def test_no_job_starts_late(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep()
    assert fake.run(path, "--start-within", "0") == 75
    assert "2 jobs were not started within 0 s" in capsys.readouterr().out
    assert not fake.calls(BF16)
    assert fake.run(path, "--start-within", "1e6") == 0
    assert len(fake.calls(MXFP4)) == 1


# ---- changed jobs


@pytest.mark.slow
def test_a_changed_job_is_refused_without_rerun(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep()
    fake.run(path)
    assert fake.run(path, "--set", "log-interval=3") == 0, "which changes nothing of the run"
    capsys.readouterr()
    assert fake.run(path, "--set", "lr=0.5") == 2
    error = capsys.readouterr().err
    assert f"2 of 2 jobs were started as other runs: {BF16} has lr 0.5 (was 0.0015); give the earlier options" in error
    assert "--rerun" in error
    assert fake.run(path, "--set", "lr=0.5", "--only", "bf16", "--rerun") == 0
    assert len(fake.calls(BF16)) == 1
    assert "0.5" in fake.calls(BF16)[0]["argv"]
    assert (fake.out / f"{BF16}.1" / "metrics.jsonl").exists()
    assert len(fake.calls(MXFP4)) == 1
    # nothing has changed since, so --rerun repeats nothing
    assert fake.run(path, "--set", "lr=0.5", "--only", "bf16", "--rerun") == 0
    assert not (fake.out / f"{BF16}.2").exists()


@pytest.mark.slow
def test_a_change_of_a_recipe_s_fields_is_named(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    def path(block: int) -> str:
        fields = [f"{gemm}.hadamard.block={block}" for gemm in ("dgrad", "wgrad")]
        return write_sweep(recipes=[{"label": "rht", "recipe": "mxfp4_rht", "recipe_set": fields}])

    fake.behave(mxfp4_rht="fail")
    fake.run(path(32))
    assert fake.run(path(64)) == 2, "a failed one would continue as another"
    assert "recipe.dgrad.hadamard.block 64 (was 32)" in capsys.readouterr().err


@pytest.mark.slow
def test_fields_that_recipes_get_later_change_no_job(fake: Fake, write_sweep: WriteSweep) -> None:
    path = write_sweep(recipes=["mxfp4"])
    fake.run(path)
    record = fake.record(MXFP4)
    del record["resolved"]["recipe"]["keep_bf16"], record["resolved"]["recipe"]["dgrad"]["hadamard"]
    record["hash"] = "of another version"
    (fake.out / MXFP4 / "cell.json").write_text(json.dumps(record))
    assert fake.run(path) == 0
    assert len(fake.calls(MXFP4)) == 1


def test_a_default_that_is_named_and_logs_that_move_change_no_job() -> None:
    def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
        parts = [{"options": options, "recipe": {}, "processes": 1} for options in (before, now)]
        fields = dict.fromkeys((field.name for field in dataclasses.fields(Record)), None)
        record = Record(**{**fields, "resolved": parts[0], "hash": "of another version"})  # type: ignore[arg-type]
        return job_record.differences(record, SimpleNamespace(resolved=parts[1]))  # type: ignore[arg-type]

    # Versions before counted --keep-last, and had --fp8-param-gather off by default.
    assert differences({"lr": 1.0, "keep_last": 1}, {"lr": 1.0, "fp8_param_gather": False}) == []
    assert differences({"lr": 1.0}, {"lr": 1.0, "fp8_param_gather": True}) == ["fp8-param-gather True (was not set)"]
    assert differences({"fp8_param_gather": True}, {"fp8_param_gather": False}) == ["fp8-param-gather False (was True)"]


# ---- places


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


def test_waiting_for_a_job_fails_when_its_sweep_has_died(fake: Fake) -> None:
    fake.launch([sys.executable, "-c", "raise SystemExit('broken')"])
    with pytest.raises(AssertionError, match=r"exit code 1 before .* at iteration 2: broken"):
        fake.wait_until_held(BF16)


# ---- signals


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


# ---- two sweeps


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


# ---- one job, the dry run


@pytest.mark.slow
def test_one_job_by_number(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(resources={"jobs_at_once": 2})
    assert fake.run(path, "--job", "1") == 0
    assert (fake.calls(BF16), len(fake.calls(MXFP4))) == ([], 1)
    assert len(json.loads((fake.out / "sweep.json").read_text())["cells"]) == 2
    capsys.readouterr()
    assert fake.run(path, "--job", "2") == 2
    assert "--job 2: the sweep has 2 jobs, 0 to 1" in capsys.readouterr().err
    assert fake.run(write_sweep(recipes=["mxfp8", "mxfp4"]), "--job", "0") == 2
    assert "its file has changed: submit it again" in capsys.readouterr().err


@pytest.mark.slow
def test_one_job_that_another_process_runs_is_an_error(fake: Fake, write_sweep: WriteSweep) -> None:
    path = write_sweep()
    fake.run(path, "--only", "mxfp4")
    assert Lock(fake.out, BF16).acquire() is None
    assert fake.run(path, "--job", "0") == 1
    assert fake.run(path) == 1, "a whole sweep leaves it to the other"
    assert not fake.calls(BF16)


def test_the_dry_run_prints_the_commands_and_starts_nothing(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(seeds=[7], resources={"gpus_per_job": 2})
    assert fake.run(path, "--dry-run", "--set", "lr=0.25") == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in lines] == [
        ["gpt_tiny-bf16-s7", "bf16", "gpt_tiny", "7"],
        ["gpt_tiny-mxfp4-s7", "mxfp4", "gpt_tiny", "7"],
    ]
    assert "-m torch.distributed.run --standalone --nproc-per-node 2" in lines[1][4]
    assert "--recipe mxfp4 --seed 7" in lines[1][4]
    assert "--lr 0.25" in lines[1][4]
    assert not fake.out.exists()


def test_a_sweep_file_that_data_path_has_taken(write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep()
    for argv, said in (
        (["--data-path", "x", path], f"no sweep file is given; --data-path took x {path}; put the file before it"),
        ([], "no sweep file is given; name one"),
    ):
        with pytest.raises(SystemExit) as ended_with:
            cli.main(argv)
        assert ended_with.value.code == 2
        assert said in capsys.readouterr().err


def test_an_error_is_one_line(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run(write_sweep(), "--size", "huge") == 2
    error = capsys.readouterr().err
    assert error.startswith("sweep.py: error: --size huge")
    assert error.count("\n") == 1
    assert not fake.out.exists()


# ---- a real one


@pytest.mark.slow
def test_a_real_job_is_interrupted_continued_and_finished(
    tmp_path: Path, write_sweep: WriteSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "visible_gpus", list)
    path, out = write_sweep(recipes=["mxfp4_rht_sr"]), tmp_path / "out"
    more = [path, "--out", str(out), "--set", "train-iters=2", "--set", "log-interval=1"]
    run = out / "gpt_tiny-mxfp4_rht_sr-s1"
    assert cli.main([*more, "--set", "exit-interval=1"]) == 0
    assert json.loads((run / "cell.json").read_text())["state"] == "interrupted"
    assert (run / "iter_0000001").is_dir()
    assert cli.main(more) == 0
    record = json.loads((run / "cell.json").read_text())
    assert (record["state"], record["attempts"], record["iteration"]) == ("done", 2, 2)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert (run / "config.yaml").exists()
    assert "continuing from" in (run / "log.txt").read_text()
