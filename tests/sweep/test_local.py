"""How jobs on this machine end and go on, with the stand-in for the driver; one real job at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lowprec.sweep import cli, local
from tests.sweep.conftest import BF16, MXFP4, Fake, WriteSweep


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
    assert fake.run(path) == 75
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


@pytest.mark.parametrize(
    ("arguments", "stopped"),
    [
        ((-10, False, False, True), True),  # Slurm signals every process of a task, in any order
        ((-15, False, False, False), True),
        ((-9, True, True, True), True),
        ((-9, False, True, True), False),  # out of memory
        ((1, False, True, False), True),  # of torchrun: one rank was asked before the others listened
        ((1, False, True, True), False),  # its save has failed
        ((1, False, False, False), False),
        ((2, False, True, False), False),
        ((-11, False, True, True), False),
    ],
)
def test_a_fault_after_a_signal_is_a_fault(arguments: tuple[int, bool, bool, bool], stopped: bool) -> None:
    assert local.is_stopped(*arguments) is stopped


@pytest.mark.slow
def test_max_failures_starts_no_more(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    fake.behave(bf16="fail", mxfp4="fail")
    assert fake.run(write_sweep(seeds=[1, 2]), "--max-failures", "2") == 1
    assert "2 failed, 2 waiting" in capsys.readouterr().out
    assert fake.run(write_sweep(seeds=[1, 2]), "--max-failures", "2", "--start-within", "1e6") == 1
    assert "were not started within" not in capsys.readouterr().out


@pytest.mark.slow
def test_no_job_starts_late(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep()
    assert fake.run(path, "--start-within", "0") == 75
    assert "2 jobs were not started within 0 s" in capsys.readouterr().out
    assert not fake.calls(BF16)
    assert fake.run(path, "--start-within", "1e6") == 0
    assert len(fake.calls(MXFP4)) == 1


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
