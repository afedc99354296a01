"""What happens to jobs, each case on nodes of its own, so that all of them can happen at once.

A case leaves its folder (``out`` is --save, ``logs`` Slurm's) and scontrol's last word about the job, ``job.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.slurm.loopback import Slurm
from tests.sweep.conftest import SWEEP
from tests.training.helpers import REPOSITORY, argv
from tests.waiting import PATIENCE, wait_for

SLOW_SAVE = 35
"""Seconds; torchrun kills ranks 30 after it was sent a signal that it handles."""
# Dropout and stochastic rounding: a run that goes on must find its random state again.
RUN: dict[str, Any] = {
    "train_iters": 30,
    "recipe": "mxfp4_rht_sr",
    "hidden_dropout": 0.1,
    "save_interval": 10,
    "eval_interval": 15,
    "eval_iters": 2,
}
CELLS = ("gpt_tiny-bf16-s1", "gpt_tiny-mxfp4_sr-s1")
wait = partial(wait_for, poll=0.2)
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class Job:
    """A job of scripts/pretrain.sbatch in a folder of its own."""

    slurm: Slurm
    folder: Path
    number: str

    @property
    def iteration(self) -> int:
        """The last iteration that was logged."""
        return last_iteration(self.folder / "out")

    def state(self) -> str:
        return self.slurm.job(self.number)["JobState"]

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in (self.folder / "logs").glob("*.log"))

    def wait(self, until: Callable[[], object], what: str) -> None:
        """Until something has come about while the job has not ended."""
        wait(lambda: until() or self.state() in _ENDED, what)
        assert until(), f"{what}: the job ended before, {self.state()}\n{self.log()[-4000:]}"

    def wait_for_requeue(self) -> None:
        self.wait(lambda: self.slurm.job(self.number)["Restarts"] != "0", "a requeue")

    def ended(self) -> None:
        """Wait for the end, and keep what Slurm says."""
        wait(lambda: self.state() in _ENDED, f"the end of job {self.number}")
        (self.folder / "job.json").write_text(json.dumps(self.slurm.job(self.number)))


def last_iteration(run: Path) -> int:
    """The last iteration in a run's metrics.jsonl, which may be being written."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["iteration"] for line in lines if '"lm loss"' in line and line[-1] == "}"), default=0)


def submit(slurm: Slurm, folder: Path, *options: str, hold: bool = False, **changes: str) -> Job:
    """scripts/pretrain.sbatch with the tiny run and options of sbatch; ``changes`` are of the environment."""
    (folder / "logs").mkdir()
    (folder / "scripts").symlink_to(REPOSITORY / "scripts")
    (folder / "pretrain_gpt.py").symlink_to(REPOSITORY / "tests" / "slurm" / "driver.py")
    if hold:
        (folder / "hold").touch()
    script = str(REPOSITORY / "scripts" / "pretrain.sbatch")
    number = slurm.call(
        *("sbatch", "--parsable", "--job-name=run", *options, script, "out", *argv(**RUN)),
        cwd=folder,
        **environment(),
        **changes,
    )
    return Job(slurm, folder, number.strip())


def environment() -> dict[str, str]:
    """The project's own programs, one thread a process, and no GPU."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def undisturbed(slurm: Slurm, folder: Path) -> None:
    """The run that all others must equal, without Slurm."""
    with (folder / "log").open("w") as log:
        subprocess.run(
            [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), "--save", "out", *argv(**RUN)],
            cwd=folder,
            env={**slurm.environment, **environment()},
            stdout=log,
            stderr=log,
            timeout=PATIENCE,
            check=True,
        )


def finished(slurm: Slurm, folder: Path) -> None:
    """One node, two processes, nothing in the way, in a "container": two cores, that is one thread a process."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    more = {"PROCESSES_PER_NODE": "2", "CONTAINER": f"taskset --cpu-list {cores}"}
    submit(slurm, folder, "--nodelist=n1", "--cpus-per-task=2", **more).ended()


def preempted(slurm: Slurm, folder: Path) -> None:
    """By a job of a higher partition, without a time of grace: Slurm requeues it."""
    job = submit(slurm, folder, "--partition=low", "--nodelist=n2", "--exclusive", hold=True)
    _preempt(job, "n2")
    job.wait_for_requeue()
    (folder / "hold").unlink()
    job.ended()


def preempted_with_grace(slurm: Slurm, folder: Path) -> None:
    """With a time of grace, and a save that takes longer than torchrun waits: the job requeues itself."""
    job = submit(slurm, folder, "--partition=grace", "--nodelist=n3", "--exclusive", hold=True)
    job.wait(lambda: job.iteration >= 2, "two iterations")
    (folder / "save_seconds").write_text(str(SLOW_SAVE))
    _preempt(job, "n3")
    job.wait_for_requeue()
    (folder / "save_seconds").unlink()
    (folder / "hold").unlink()
    job.ended()


def out_of_time(slurm: Slurm, folder: Path) -> None:
    """Slurm looks at limits every half a minute; what is left then is for the save."""
    job = submit(slurm, folder, "--nodelist=n4", "--time=60", "--signal=B:USR1@1500", hold=True)
    job.wait(lambda: job.iteration >= 2, "two iterations")
    (folder / "hold_save").touch()
    slurm.call("scontrol", "update", f"JobId={job.number}", "EndTime=now+1500seconds")
    job.wait(lambda: "asking for a checkpoint" in job.log(), "a signal")
    # the limit that the job comes back with
    slurm.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    (folder / "hold_save").unlink()
    job.wait_for_requeue()
    (folder / "hold").unlink()
    job.ended()


def cancelled(slurm: Slurm, folder: Path) -> None:
    """By its user. A job that was put back into the queue, when it could not be any more, would be in the queue."""
    job = submit(slurm, folder, "--nodelist=n5", hold=True)
    job.wait(lambda: job.iteration >= 2, "two iterations")
    slurm.call("scancel", job.number)
    wait(lambda: not slurm.call("squeue", "--noheader", f"--job={job.number}").strip(), "the end")
    job.ended()


def two_nodes(slurm: Slurm, folder: Path) -> None:
    """A process on each of two nodes; in the middle its user asks for another start."""
    job = submit(slurm, folder, "--nodelist=n6,n7", "--nodes=2", hold=True)
    job.wait(lambda: job.iteration >= 2, "two iterations")
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for_requeue()
    (folder / "hold").unlink()
    job.ended()


def _preempt(job: Job, node: str) -> None:
    job.wait(lambda: job.iteration >= 2, "two iterations")
    more = ("--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    job.slurm.call("sbatch", "--partition=high", f"--nodelist={node}", *more, cwd=job.folder)


def array(slurm: Slurm, folder: Path) -> None:
    """A sweep as an array, one of whose tasks is preempted, with grace; and the same sweep without Slurm."""
    options = {**SWEEP["options"], "train-iters": 30, "eval-iters": 2, "save-interval": 10, "log-interval": 1}
    sweep = {**SWEEP, "recipes": ["bf16", "mxfp4_sr"], "options": options, "resources": {"jobs_at_once": 2}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    (folder / "hold").touch()
    program = [sys.executable, str(REPOSITORY / "tests" / "slurm" / "held_sweep.py"), "sweep.yaml"]
    on = [f"--sbatch={option}" for option in ("gpus=0", "partition=grace", "nodelist=n8", "cpus-per-task=2")]
    printed = slurm.call(*program, "--slurm", *on, "--out", "array", cwd=folder, **environment())
    number = printed.split(":")[0].removeprefix("job ")
    tasks = [f"{number}_{index}" for index in range(len(CELLS))]
    wait(lambda: all(last_iteration(folder / "array" / cell) >= 2 for cell in CELLS), "two iterations of each task")

    # It wants two of the node's four cores, so one task has to go.
    more = ("--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 1")
    slurm.call("sbatch", "--partition=high", "--nodelist=n8", *more, cwd=folder)
    wait(lambda: any(slurm.job(task)["Restarts"] != "0" for task in tasks), "a requeue")
    (folder / "hold").unlink()
    wait(lambda: all(slurm.job(task)["JobState"] in _ENDED for task in tasks), "the end of the array")
    (folder / "job.json").write_text(json.dumps([slurm.job(task) for task in tasks]))
    local = subprocess.run(
        [*program, "--out", "local"],
        cwd=folder,
        env={**slurm.environment, **environment()},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    (folder / "local.txt").write_text(local.stdout)
    (folder / "array.txt").write_text(
        slurm.call(*program, "--status", "--out", "array", cwd=folder, **environment()),
    )


CASES: dict[str, Callable[[Slurm, Path], None]] = {
    case.__name__: case
    for case in (preempted_with_grace, out_of_time, array, two_nodes, preempted, finished, cancelled, undisturbed)
}
"""The longest ones first."""
