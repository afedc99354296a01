"""The command line of a sweep: one of its jobs, a dry run, and mistakes."""

from __future__ import annotations

import json

import pytest

from megatron_lowprec.sweep import cli
from tests.sweep.conftest import BF16, MXFP4, Fake, WriteSweep


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


@pytest.mark.parametrize("number", ["0", "-1"])
def test_no_failure_at_all_is_no_limit(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    assert fake.run(write_sweep(), "--max-failures", number) == 2
    assert f"--max-failures {number} starts no job; give at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--slurm-dry-run", "--max-failures", "1"], "--slurm has no use for --max-failures"),
        (
            ["--slurm", "--start-within", "5", "--max-failures", "1"],
            "no use for --max-failures and --start-within, as Slurm starts the jobs",
        ),
        (["--slurm-dry-run", "--gpus", "9,10", "--jobs-per-gpu", "3"], "no use for --gpus and --jobs-per-gpu"),
        (["--start-within", "nan"], "--start-within nan is no time; give seconds"),
    ],
)
def test_limits_of_this_process_are_not_for_slurm(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert fake.run(write_sweep(), *flags) == 2
    assert said in capsys.readouterr().err


def test_a_task_shares_its_gpus_with_none(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(resources={"jobs_per_gpu": 2})
    assert fake.run(path, "--slurm-dry-run", "--gpus-per-job", "4") == 0
    assert "#SBATCH --gpus=4\n" in capsys.readouterr().out


def test_an_error_is_one_line(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run(write_sweep(), "--size", "huge") == 2
    error = capsys.readouterr().err
    assert error.startswith("sweep.py: error: --size huge")
    assert error.count("\n") == 1
    assert not fake.out.exists()
