"""scripts/pretrain.sbatch with stand-ins for Slurm's and torch's commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.waiting import PATIENCE, ended, wait_for

ROOT = Path(__file__).parents[2]
# srun as one node would: it starts what follows with a node's number.
COMMANDS = {
    "scontrol": 'echo "scontrol $*" >> calls; [ "$1" != show ] || printf "node1\\nnode2\\n"',
    "srun": 'while [[ $1 = --* ]]; do options+=" $1"; shift; done; echo "srun$options" >> calls; '
    'export BATCH=$PPID; SLURM_NODEID=1 "$@"',
    "torchrun": 'echo "torchrun $*" >> calls; eval "$RUN"',
    "scancel": 'echo "scancel $*" >> calls; touch told',
}


def submit(folder: Path, run: str, **more: str) -> tuple[int, list[str], str]:
    """The script's exit code, the commands that it called, with torchrun doing ``run``, and what it printed.

    ``more``: of the environment, or what another command does.
    """
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, body in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{more.pop(name, body)}\n")
        (commands / name).chmod(0o755)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "96",
    }
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MASTER_PORT")}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/pretrain.sbatch"), "out", "--recipe", "mxfp4 rht"],
        cwd=folder,
        env={**inherited, **job, "PATH": f"{commands}:{os.environ['PATH']}", "RUN": run, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    return done.returncode, (folder / "calls").read_text().splitlines(), done.stdout + done.stderr


@pytest.mark.slow
def test_an_interrupted_run_is_requeued(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    code, calls, _ = submit(tmp_path, "echo SIGTERM > out/requeue; exit 1")
    assert code == 0
    assert calls[-1] == "scontrol requeue 7"


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1])
def test_a_run_that_ended_is_not_and_an_old_request_is_no_reason(tmp_path: Path, code: int) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "requeue").write_text("of an earlier start")
    found, calls, _ = submit(tmp_path, f"exit {code}")
    assert found == code
    assert not [call for call in calls if "requeue" in call]


@pytest.mark.slow
def test_torchrun_gets_nodes_and_signals(tmp_path: Path) -> None:
    _, calls, _ = submit(tmp_path, 'echo "environment $SRUN_CPUS_PER_TASK $OMP_NUM_THREADS $MASTER_ADDR" >> calls')
    (call,) = [call for call in calls if call.startswith("torchrun")]
    for words in (
        "--node-rank 1 --nnodes 2 --nproc-per-node 8 --master-addr node1 --master-port 20007",
        "--signals-to-handle SIGINT,SIGHUP,SIGQUIT pretrain_gpt.py",
        "pretrain_gpt.py --save out --recipe mxfp4 rht",
    ):
        assert words in call
    assert "environment 96 12 node1" in calls


@pytest.mark.slow
def test_variables_of_a_site(tmp_path: Path) -> None:
    own = {"PROCESSES_PER_NODE": "4", "OMP_NUM_THREADS": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    wrapped = {"SRUN_OPTIONS": "--mpi=none", "CONTAINER": "env INSIDE=yes", "SLURM_CPUS_PER_TASK": "40"}
    _, calls, _ = submit(tmp_path, 'echo "$INSIDE $SRUN_CPUS_PER_TASK $OMP_NUM_THREADS" >> calls', **own, **wrapped)
    (call,) = [call for call in calls if call.startswith("torchrun")]
    assert "--nproc-per-node 4 --master-addr 10.0.0.1 --master-port 29500" in call
    assert "yes 40 3" in calls
    assert "srun --kill-on-bad-exit=1 --mpi=none" in calls


@pytest.mark.slow
@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_ranks_get_the_signal_and_torchrun_does_not(tmp_path: Path, number: str) -> None:
    # Like Slurm, also signal torchrun, here a shell; the ranks answer to scancel's signal.
    run = f"kill -{number} $$ $BATCH; while [ ! -e told ]; do sleep 0.1; done"
    code, calls, printed = submit(tmp_path, run)
    assert code == 0, printed
    assert "scancel --signal=USR1 7" in calls
    assert f"SIG{number}: asking for a checkpoint" in printed


@pytest.mark.slow
def test_a_signal_before_the_step_s_number_is_known_is_passed_on(tmp_path: Path) -> None:
    held = """set -T; trap 'if [[ $BASH_COMMAND = "step=\\$!" ]]; then touch held
        while [ ! -e signalled ]; do sleep 0.1; done; fi' DEBUG"""
    (tmp_path / "held.sh").write_text(held)
    run = """while [ ! -e held ]; do sleep 0.1; done; kill -USR1 $BATCH; touch signalled
        while [ ! -e told ]; do sleep 0.1; done"""
    code, calls, printed = submit(tmp_path, run, BASH_ENV=str(tmp_path / "held.sh"))
    assert code == 0, printed
    assert "scancel --signal=USR1 7" in calls


@pytest.mark.slow
def test_a_requeued_job_gets_no_more_signals(tmp_path: Path) -> None:
    # scancel tries for minutes where a job is ending, and would tell the next start, too
    tries = 'echo $$ > told; while [ ! -e requeued ]; do sleep 0.1; done; touch "told again"'
    scontrol = COMMANDS["scontrol"] + '; [ "$1" != requeue ] || touch requeued'
    run = "kill -TERM $BATCH; while [ ! -s told ]; do sleep 0.1; done; echo SIGTERM > out/requeue; exit 1"
    (tmp_path / "out").mkdir()
    code, calls, printed = submit(tmp_path, run, scancel=tries, scontrol=scontrol)
    assert (code, calls[-1]) == (0, "scontrol requeue 7"), printed
    scancel = int((tmp_path / "told").read_text())
    wait_for(lambda: ended(scancel), "the end of scancel")
    assert not (tmp_path / "told again").exists()


@pytest.mark.slow
def test_a_job_from_another_folder_names_the_right_one(tmp_path: Path) -> None:
    script = ["bash", str(ROOT / "scripts/pretrain.sbatch"), "runs/x"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"pretrain.sbatch: error: {tmp_path} is not the repository's folder; submit the job from there\n"
    )
