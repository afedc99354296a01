"""scripts/pretrain.sbatch and arrays of sweeps under a real Slurm (``loopback.py``).

All cases happen in one Slurm, at once, and in one of xdist's workers; the tests look at what they have left.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.once import once
from tests.slurm import loopback
from tests.slurm.cases import CASES, CELLS, RUN
from tests.training.helpers import rows

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@dataclass(frozen=True)
class Cases:
    """Folders of the cases, by name."""

    folder: Path

    def __getitem__(self, name: str) -> Path:
        error = self.folder / name / "error"
        assert not error.exists(), error.read_text()
        return self.folder / name

    def losses(self, name: str) -> list[dict[str, Any]]:
        return exact(self[name] / "out")

    def job(self, name: str) -> dict[str, str]:
        content: dict[str, str] = json.loads((self[name] / "job.json").read_text())
        return content

    def log(self, name: str) -> str:
        (path,) = (self[name] / "logs").glob("*.log")
        return path.read_text()


def exact(run: Path) -> list[dict[str, Any]]:
    """Every row's exact losses, those of evaluations included."""
    kept = ("iteration", "consumed samples")
    return [{key: value for key, value in row.items() if "hex" in key or key in kept} for row in rows(run)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Cases:
    """One Slurm for all workers: the first that comes lets all cases happen, the others wait."""

    def happen(folder: Path) -> None:
        reason = loopback.missing()
        if reason is None:
            asked = {name for item in request.session.items for name in CASES if f"[{name}]" in item.name}
            _let_happen(folder, asked | {"undisturbed", "finished"})
        else:
            (folder / "missing").write_text(reason)

    folder = once(tmp_path_factory, "slurm", happen)
    if (folder / "missing").exists():
        pytest.skip((folder / "missing").read_text())
    return Cases(folder)


def _let_happen(folder: Path, wanted: set[str]) -> None:
    names = [name for name in CASES if name in wanted]

    def one(name: str) -> None:
        (folder / name).mkdir()
        try:
            CASES[name](slurm, folder / name)
        except Exception:  # noqa: BLE001 - its own test shows it
            (folder / name / "error").write_text(traceback.format_exc() + slurm.logs())

    # munged refuses folders below one that others may write to
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as state,
        loopback.running(Path(state)) as slurm,
        ThreadPoolExecutor(len(names)) as pool,  # much of a case is waiting
    ):
        list(pool.map(one, names))


@pytest.mark.parametrize("name", ["undisturbed"])
def test_the_run_that_others_are_compared_with(cases: Cases, name: str) -> None:
    found = cases.losses(name)
    assert [row["iteration"] for row in found if "lm loss hex" in row] == list(range(1, RUN["train_iters"] + 1))


@pytest.mark.parametrize("name", ["finished"])
def test_a_job_that_nothing_disturbs(cases: Cases, name: str) -> None:
    job = cases.job(name)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("COMPLETED", "0", "0:0")
    assert "data 2" in cases.log(name)
    assert "continuing" not in cases.log(name)
    assert len([row for row in cases.losses(name) if "lm loss hex" in row]) == RUN["train_iters"]


INTERRUPTIONS = {
    # by Slurm itself: the job has no say in it
    "preempted": ("SIGTERM", "DUE TO PREEMPTION", True),
    # SIGTERM to the processes of the step, for as long as GraceTime
    "preempted_with_grace": ("SIGTERM", "back into the queue", True),
    "out_of_time": ("SIGUSR1", "back into the queue", True),
    "two_nodes": ("SIGUSR1", "back into the queue", False),
}


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_an_interrupted_job_saves_comes_back_and_ends_with_the_same_bits(cases: Cases, name: str) -> None:
    reason, said, one_process = INTERRUPTIONS[name]
    job, log = cases.job(name), cases.log(name)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("COMPLETED", "1", "0:0"), log
    assert f": {reason}\n" in log
    assert said in log
    assert log.count("continuing from out/iter_") == 1
    # two processes add up their gradients in another order than one
    assert cases.losses(name) == cases.losses("undisturbed" if one_process else "finished")
    assert not (cases[name] / "out" / "requeue").exists()


@pytest.mark.parametrize("name", ["cancelled"])
def test_a_cancelled_job_stays_so(cases: Cases, name: str) -> None:
    job = cases.job(name)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    assert "back into the queue" not in cases.log(name)


@pytest.mark.parametrize("name", ["array"])
def test_an_array_with_a_preempted_task_gives_the_table_of_a_local_sweep(cases: Cases, name: str) -> None:
    folder = cases[name]
    tasks = json.loads((folder / "job.json").read_text())
    logs = [path.read_text() for path in sorted((folder / "array" / "logs").iterdir())]
    assert [task["JobState"] for task in tasks] == ["COMPLETED"] * len(CELLS), "\n".join(logs)
    assert sorted(task["Restarts"] for task in tasks) == ["0"] * (len(CELLS) - 1) + ["1"]
    assert sum("attempt 2" in log for log in logs) == 1
    tables = [[line.split() for line in (folder / f"{run}.txt").read_text().splitlines()] for run in ("array", "local")]
    # cell, state, iteration, loss, validation; times differ
    found = [[row[:5] for row in table if row and row[0] in CELLS] for table in tables]
    assert found[0] == found[1]
    assert [row[:3] for row in found[0]] == [[cell, "done", "30/30"] for cell in CELLS]
    for cell in CELLS:
        assert exact(folder / "array" / cell) == exact(folder / "local" / cell)
