"""Submits a sweep as a Slurm job array: one task per job, which saves and requeues itself when interrupted."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from megatron_lowprec.errors import UserError
from megatron_lowprec.sweep.jobs import Job
from megatron_lowprec.sweep.spec import Sweep, checked_directive

SCRIPT = "sweep.sbatch"
LOGS = "logs"
SIGNAL_SECONDS = 180
"""Seconds before its time limit at which a task is signaled: enough for a step, an evaluation and a checkpoint."""
_FUNCTIONS = str(Path(__file__).with_name("requeue.sh"))
# In sbatch's message if it reached no controller: no option of a job changes that.
_NO_CONTROLLER = ("contact slurm controller", "establish a configuration source", "process configuration file")
_NEEDS_QUOTES = re.compile(r"[^\w@%+=:,./\[\]-]", re.ASCII)
_GPU_COUNTS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task")
_RESOURCES = ("gres", "tres-per-task")  # which may be others than GPUs

_BODY = """\
set -u
cd {folder} || exit 1
source {functions} || exit 1

jobs=({jobs})
job=${{jobs[$SLURM_ARRAY_TASK_ID]}}
echo "$(date +%FT%T) $(hostname): $job, restart ${{SLURM_RESTART_COUNT:-0}}"
# A sweep that is just starting must not die of a signal that is sent again.
save_and_requeue {out}/"$job" bash -c 'trap "" TERM USR1; exec "$@"' bash \\
    {command} --job "$SLURM_ARRAY_TASK_ID"
exit $?
"""


def script(
    sweep: Sweep, jobs: Sequence[Job], chosen: Sequence[Job], out: Path, folder: Path, arguments: Sequence[str]
) -> str:
    """The batch script.

    Args:
        jobs: all jobs of the sweep, which the task ids index.
        chosen: jobs that get a task.
        folder: working directory of the tasks, the base of relative data paths.
        arguments: of megatron-lowprec sweep, except --job.
    """
    limit = f"%{sweep.resources.jobs_at_once}" if sweep.resources.jobs_at_once else ""
    name = f"{sweep.name}-{sweep.size}" if sweep.size else sweep.name
    options = {
        "job-name": name,
        **{key: value for key, value in sweep.slurm.items() if not _asks_for_gpus(key, value)},
        **gpus(sweep),
        "array": indices([job.index for job in chosen]) + limit,
        "nodes": "1",
        "ntasks": "1",
        "requeue": None,
        "open-mode": "append",
        "output": f"{out / LOGS}".replace("%", "%%") + "/%A_%a.log",
        "signal": f"B:USR1@{SIGNAL_SECONDS}",
    }
    head = [f"#SBATCH --{key}" + ("" if value is None else f"={_quoted(key, value)}") for key, value in options.items()]
    body = _BODY.format(
        folder=shlex.quote(str(folder)),
        jobs=" ".join(job.id for job in jobs),
        out=shlex.quote(str(out)),
        command=shlex.join([sys.executable, *arguments]),
        functions=shlex.quote(_FUNCTIONS),
    )
    return "\n".join(["#!/bin/bash", *head, "", body])


def submit(text: str, out: Path) -> str:
    """Write the script into ``out`` and submit it with sbatch; returns the Slurm job id.

    Raises:
        UserError: sbatch is missing or fails.
    """
    if shutil.which("sbatch") is None:
        raise UserError("--slurm: there is no sbatch on the PATH; run it where jobs are submitted, or --slurm-dry-run")
    (out / LOGS).mkdir(parents=True, exist_ok=True)
    path = out / SCRIPT
    path.write_text(text, encoding="utf-8")
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split())
        if any(words in why for words in _NO_CONTROLLER):
            raise UserError(f"--slurm: {why}; run it where sinfo lists nodes, or without --slurm on this machine")
        raise UserError(f"sbatch refused {path}: {why}; change it by --sbatch KEY=VALUE")
    return done.stdout.strip().split(";")[0]


def indices(numbers: Sequence[int]) -> str:
    """``0-3,5``: ascending numbers in the syntax of sbatch's --array."""
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _asks_for_gpus(key: str, value: str | None) -> bool:
    return key in _GPU_COUNTS or (key in _RESOURCES and "gpu" in str(value))


def gpus(sweep: Sweep) -> Mapping[str, str]:
    """sbatch options for a job's GPUs: the sweep's own if given, else by gpus_per_job; none if 0."""
    own = {key: value for key, value in sweep.slurm.items() if _asks_for_gpus(key, value)}
    asked = own or {"gpus": str(sweep.resources.gpus_per_job or 1)}
    return {key: value for key, value in asked.items() if value != "0"}


def _quoted(key: str, value: str) -> str:
    return f'"{checked_directive(key, value)}"' if _NEEDS_QUOTES.search(value) else value
