"""The job array: the script's text, and what it does, with stand-ins for Slurm and the driver."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.sweep import slurm
from megatron_lowprec.sweep.job_record import Lock
from megatron_lowprec.sweep.slurm import indices
from tests.sweep.conftest import REPOSITORY, Fake, WriteSweep
from tests.waiting import Started

BF16, MXFP4 = "gpt_tiny-bf16-s1", "gpt_tiny-mxfp4-s1"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([0], "0"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 5], "0,2-3,5"), ([4, 5, 9], "4-5,9")],
)
def test_indices(numbers: list[int], text: str) -> None:
    assert indices(numbers) == text


def options(text: str) -> dict[str, str | None]:
    """#SBATCH lines by name; each may be there once."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    found = {key: value if equals else None for key, equals, value in (line.partition("=") for line in lines)}
    assert len(found) == len(lines)
    return found


def is_bash(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "small", "full"])
def test_the_script_of_every_size(fake: Fake, capsys: pytest.CaptureFixture[str], size: str) -> None:
    path = ["configs/sweeps/paper_table2.yaml", "--size", size]
    path += [] if size == "tiny" else ["--data-path", "a text_document"]
    assert fake.run(*path, "--slurm-dry-run", "--sbatch", "partition=gpu", "--sbatch", "time=12:00:00") == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert is_bash(text)
    found = options(text)
    gpus = {"tiny": {}, "small": {"gpus": "1", "cpus-per-task": "8"}, "full": {"gpus": "8", "cpus-per-task": "64"}}
    assert found == {
        "job-name": f"paper_table2-{size}",
        "partition": "gpu",
        "time": "12:00:00",
        "array": {"tiny": "0-9%2", "small": "0-9", "full": "0-29"}[size],
        "nodes": "1",
        "ntasks": "1",
        "requeue": None,
        "open-mode": "append",
        "output": f"{fake.out}/logs/%A_%a.log",
        "signal": "B:USR1@180",
        **gpus[size],
    }
    (command,) = [line for line in text.splitlines() if " --job " in line]
    assert f"-m megatron_lowprec sweep {SHIPPED}/configs/sweeps/paper_table2.yaml --size={size}" in command
    assert ("--data-path 'a text_document'" in command) == (size != "tiny")
    assert not fake.out.exists()


def test_a_request_for_gpus_of_ones_own(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(resources={"gpus_per_job": 2})
    for flags, expected in (
        (["--sbatch", "tres-per-task=cpu:4"], {"gpus": "2"}),
        (["--gpus-per-job", "4"], {"gpus": "4"}),
        (["--sbatch", "gres=gpu:h200:2"], {"gres": "gpu:h200:2"}),
        (["--sbatch", "gpus-per-socket=2"], {"gpus-per-socket": "2"}),
        (["--sbatch", "gpus=0"], {}),
    ):
        assert fake.run(path, "--slurm-dry-run", *flags) == 0
        found = options(capsys.readouterr().out)
        assert {key: value for key, value in found.items() if key.startswith(("gpus", "gres"))} == expected


BREAKS = "x\ntouch PWNED #"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slurm": {"comment": BREAKS}}, "slurm: comment: "),
        ({"slurm": {"gres": BREAKS}}, "slurm: gres: "),
        ({"slurm": {BREAKS: "x"}}, "is no long option of sbatch"),
        ({"slurm": {"comment": 'a"b'}}, "slurm: comment: "),
        ({"slurm": {"comment": "a'b"}}, "slurm: comment: "),
        ({"slurm": {"comment": "a\\"}}, "slurm: comment: "),
        ({"slurm": {"comment": "a\u2028b"}}, "slurm: comment: "),
        ({"sizes": {BREAKS: {}}}, "names a folder"),
        ({"sizes": {"tiny": {"slurm": {"comment": BREAKS}}}}, "slurm: comment: "),
        ({"sizes": {"a b": {}}}, "names a folder"),
    ],
)
def test_no_text_of_a_sweep_becomes_a_line_of_the_script(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    assert fake.run(write_sweep(**changes), "--slurm-dry-run") == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flag", ["comment=x\ntouch PWNED #", "x\ntouch PWNED=1"])
def test_no_option_of_the_command_line_does(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert fake.run(write_sweep(), "--slurm-dry-run", "--sbatch", flag) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_no_folder_or_file_name_does(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(write_sweep())
    strange = path.rename(path.with_name("a\ntouch PWNED #.yaml"))
    assert fake.run(str(strange), "--slurm-dry-run") == 2
    assert "would end the #SBATCH line" in capsys.readouterr().err


def test_text_with_spaces_is_one_word(fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(slurm={"comment": "two words # one", "constraint": "a|b"})
    assert fake.run(path, "--slurm-dry-run") == 0
    found = options(capsys.readouterr().out)
    assert (found["comment"], found["constraint"]) == ('"two words # one"', '"a|b"')


def test_resources_and_settings_reach_the_tasks(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--set=--lr=1e-2", "--processes-per-job", "2", "--jobs-at-once", "3", "--rerun"]
    assert fake.run(write_sweep(), "--slurm-dry-run", *flags) == 0
    text = capsys.readouterr().out
    assert options(text)["array"] == "0-1%3"
    (command,) = [line for line in text.splitlines() if " --job " in line]
    assert "--set=--lr=1e-2 --processes-per-job 2 --rerun --job" in command


def test_a_dry_run_of_an_array_prints_its_script(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep()
    assert fake.run(path, "--slurm-dry-run", "--sbatch", "time=1:00") == 0
    script = capsys.readouterr().out
    assert fake.run(path, "--slurm", "--dry-run", "--sbatch", "time=1:00") == 0
    assert capsys.readouterr().out == script
    assert "#SBATCH --time=1:00" in script


def test_options_of_sbatch_are_for_slurm(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake.run(write_sweep(), "--sbatch", "time=1:00") == 2
    assert "--sbatch time=1:00 is for --slurm only; add --slurm, or leave --sbatch out" in capsys.readouterr().err
    assert not fake.out.exists()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the PATH with stand-ins that note their arguments."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    add(folder, "sbatch", "echo 4242")
    # a step on this machine, and a signal to it
    add(folder, "srun", f'while [[ $1 = --* ]]; do shift; done; echo $$ > {folder}/step; exec "$@"')
    add(folder, "scancel", f"kill -${{1#--signal=}} $(cat {folder}/step)")
    add(folder, "scontrol", 'case "$*" in *show*) echo "JobId=77 JobState=RUNNING Reason=None";; esac')
    return folder


def add(folder: Path, name: str, does: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "$@" >> {folder}/{name}.calls\n{does}\n')
    path.chmod(0o755)


def calls(folder: Path, name: str) -> list[str]:
    """Arguments of its calls, but of those that only look."""
    path = folder / f"{name}.calls"
    return [line for line in path.read_text().splitlines() if "show" not in line] if path.exists() else []


@pytest.mark.slow
def test_submitting_writes_the_script_and_the_manifest(
    fake: Fake, write_sweep: WriteSweep, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(seeds=[1, 2, 3])
    fake.run(path, "--only", MXFP4)  # is done and gets no task
    assert Lock(fake.out, "gpt_tiny-bf16-s2").acquire() is None  # has a runner
    capsys.readouterr()
    assert fake.run(path, "--slurm") == 0
    assert calls(programs, "sbatch") == [f"--parsable {fake.out}/sweep.sbatch"]
    assert options((fake.out / "sweep.sbatch").read_text())["array"] == "0,3-5"
    assert (fake.out / "logs").is_dir()
    assert (fake.out / "sweep.json").exists()
    assert not fake.calls(BF16), "nothing runs here"
    printed = capsys.readouterr().out
    assert "job 4242: 4 of 6 jobs" in printed
    assert f"--out {fake.out} --status" in printed


@pytest.mark.slow
def test_nothing_to_submit(
    fake: Fake, write_sweep: WriteSweep, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep()
    fake.run(path)
    assert fake.run(path, "--slurm") == 0
    assert "nothing to submit; 2 done" in capsys.readouterr().out
    assert not calls(programs, "sbatch")


@pytest.mark.slow
def test_without_sbatch_and_with_one_that_refuses(
    fake: Fake,
    write_sweep: WriteSweep,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add(programs, "sbatch", "echo 'invalid partition specified: gpu' >&2; exit 1")
    assert fake.run(write_sweep(), "--slurm", "--sbatch", "partition=gpu") == 2
    assert "sbatch refused" in (error := capsys.readouterr().err)
    assert "invalid partition specified: gpu; change it by --sbatch KEY=VALUE" in error
    down = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    add(programs, "sbatch", f"echo '{down}' >&2; exit 1")
    assert fake.run(write_sweep(), "--slurm") == 2
    error = capsys.readouterr().err
    assert f"--slurm: {down}; run it where sinfo lists nodes" in error
    assert "KEY=VALUE" not in error, "no option of a job helps"
    monkeypatch.setenv("PATH", "/nowhere")
    assert fake.run(write_sweep(), "--slurm") == 2
    assert "there is no sbatch on the PATH" in capsys.readouterr().err


# ---- what the script does


def prepare(fake: Fake, path: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script, with the stand-in in the place of the command."""
    assert fake.run(path, "--slurm-dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    program, code = fake.program()[0], fake.driver.with_name("program.py")
    code.write_text(fake.program()[2])
    (at,) = [i for i, line in enumerate(lines) if " --job " in line]
    arguments = lines[at].strip().partition(" -m megatron_lowprec sweep ")[2]
    lines[at] = f"{program} {code} {arguments}"
    script = fake.driver.with_name("task.sh")
    script.write_text("\n".join(lines) + "\n")
    return script


def start(fake: Fake, script: Path, number: int) -> Started:
    """The script as Slurm runs it."""
    job = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": str(number)}
    return fake.launch(["bash", str(script)], **job)


def task(fake: Fake, path: str, number: int, capsys: pytest.CaptureFixture[str]) -> Started:
    """A task of a sweep."""
    return start(fake, prepare(fake, path, capsys), number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviors", "number", "expected", "words", "requeues"),
    [
        ({}, 1, 0, f"{MXFP4}: done", []),
        ({"bf16": "fail"}, 0, 1, "something is wrong", []),
        ({"mxfp4": "requeue"}, 1, 0, "interrupted (SIGUSR1 at iteration 2): back into the queue", ["requeue 70_1"]),
    ],
    ids=["done", "failed", "requeue file"],
)
def test_a_task_runs_its_job_and_ends_as_it_does(
    fake: Fake,
    write_sweep: WriteSweep,
    programs: Path,
    capsys: pytest.CaptureFixture[str],
    behaviors: dict[str, str],
    number: int,
    expected: int,
    words: str,
    requeues: list[str],
) -> None:
    """A job that asks to be requeued is, whatever its exit code."""
    fake.behave(**behaviors)
    code, printed = task(fake, write_sweep(), number, capsys).ended()
    assert code == expected, printed
    assert words in printed
    assert (len(fake.calls(BF16)), len(fake.calls(MXFP4))) == ((0, 1) if number else (1, 0))
    assert calls(programs, "scontrol") == requeues


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_an_interrupted_task_saves_requeues_itself_and_goes_on(
    fake: Fake, write_sweep: WriteSweep, programs: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    fake.behave(bf16="hold")
    started = task(fake, write_sweep(), 0, capsys)
    fake.wait_until_held(BF16)
    started.process.send_signal(number)
    code, printed = started.ended()
    assert code == 0, printed
    assert f"{number.name}: asking for a checkpoint" in printed
    assert calls(programs, "scontrol") == ["requeue 70_0"]
    record = fake.record(BF16)
    assert (record["state"], record["iteration"]) == ("interrupted", 3)
    # Slurm starts it again
    fake.behave()
    started = task(fake, write_sweep(), 0, capsys)
    code, printed = started.ended()
    assert code == 0, printed
    assert fake.record(BF16)["state"] == "done"
    assert fake.calls(BF16)[1]["begun"] == 3
    assert calls(programs, "scontrol") == ["requeue 70_0"], "and not once more"


@pytest.mark.slow
def test_an_old_request_is_not_answered_by_a_task_that_cannot_start(
    fake: Fake, write_sweep: WriteSweep, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.behave(bf16="requeue")
    path = write_sweep()
    fake.run(path)
    assert (fake.out / BF16 / "requeue").exists()
    capsys.readouterr()
    script = prepare(fake, path, capsys)
    write_sweep(recipes=["mxfp8", "mxfp4"])
    started = start(fake, script, 0)
    code, printed = started.ended()
    assert code == 2, printed
    assert "its file has changed" in printed
    assert calls(programs, "scontrol") == []


@pytest.mark.slow
@pytest.mark.parametrize(("state", "requeued"), [("COMPLETING", False), ("CANCELLED", False), ("SUSPENDED", True)])
def test_a_cancelled_task_does_not_come_back(
    fake: Fake,
    write_sweep: WriteSweep,
    programs: Path,
    capsys: pytest.CaptureFixture[str],
    state: str,
    requeued: bool,
) -> None:
    add(programs, "scontrol", f'case "$*" in *"show job 70_0") echo "JobId=77 JobState={state} Reason=None";; esac')
    fake.behave(bf16="requeue")
    started = task(fake, write_sweep(), 0, capsys)
    started.ended()
    assert calls(programs, "scontrol") == ["requeue 70_0"] * requeued


@pytest.mark.slow
def test_a_task_that_cannot_be_requeued_has_an_error(
    fake: Fake, write_sweep: WriteSweep, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(programs, "scontrol", "exit 1")
    fake.behave(bf16="requeue")
    started = task(fake, write_sweep(), 0, capsys)
    code, printed = started.ended()
    assert code == 1
    assert "submit it again to go on" in printed


@pytest.mark.slow
def test_a_path_with_spaces_and_percents(fake: Fake, write_sweep: WriteSweep, programs: Path, tmp_path: Path) -> None:
    fake.out = tmp_path / "a folder of 50%A"
    assert fake.run(write_sweep(), "--slurm") == 0
    text = (fake.out / slurm.SCRIPT).read_text()
    assert options(text)["output"] == f'"{tmp_path}/a folder of 50%%A/logs/%A_%a.log"'
    assert is_bash(text)


def test_a_batch_script_outside_of_slurm_is_an_error() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", "scripts/pretrain.sbatch", "runs/x"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "pretrain.sbatch: error: a batch script runs as a job of Slurm: submit it with sbatch"
    )
    assert done.stderr.count("\n") == 1
