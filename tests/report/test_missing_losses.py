"""Training losses that are not finite or lost, as of a skipped iteration, leave comparisons as they are."""

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lowprec.report import plot_style, plots
from megatron_lowprec.report.curve import Curve, Series, Status, how_it_ended
from megatron_lowprec.report.groups import Group
from megatron_lowprec.report.verdict import Outcome, Verdict
from tests.report.judging import claims, gap_is, groups, judged
from tests.report.synthetic import write_run


def lose(folder: Path, iterations: Collection[int], *, rows: bool = False) -> Path:
    """Make these training losses NaN, or drop their rows."""
    kept = []
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        lost = row["iteration"] in iterations and "lm loss" in row
        if not (lost and rows):
            kept.append(json.dumps(row | ({"lm loss": math.nan} if lost else {})) + "\n")
    (folder / "metrics.jsonl").write_text("".join(kept))
    return folder


def drawn(group: Group, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tokens and means of the curves in the figure of training losses: each recipe's, then the differences."""
    found: list[Any] = []
    monkeypatch.setattr(plots, "band", lambda axes, x, mean, *rest: found.append((x, mean)))
    plots.losses("training loss", group, plot_style.styles(group.labels, "bf16"), plot_style.LIGHT)
    return found


@pytest.mark.parametrize("rows", [False, True], ids=["not finite", "lost"])
def test_a_lost_iteration_does_not_cut_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: bool) -> None:
    """Of 1,500 iterations every second is drawn, and the lost one shifts which."""
    runs = {
        (recipe, seed): write_run(tmp_path / f"{recipe}-{seed}", recipe, seed, final, options={"train_iters": 1500})
        for recipe, final in (("bf16", 3.7), ("mxfp4", 3.72))
        for seed in (1, 2)
    }
    lose(runs["mxfp4", 2], [900], rows=rows)
    (group,) = groups(*runs.values())
    reference, other, difference = drawn(group, monkeypatch)
    assert len(reference[0]) == len(other[0]) == len(difference[0]) > 700
    assert difference[1] == pytest.approx(0.02, abs=1e-9)


def test_runs_without_common_iterations_have_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lose(write_run(tmp_path / "bf16"), range(200), rows=True)
    (group,) = groups(first, lose(write_run(tmp_path / "mxfp4", "mxfp4"), range(200, 401), rows=True))
    assert [run.status for run in group.runs] == [Status.FINISHED] * 2
    assert len(drawn(group, monkeypatch)) == 2


def early(tmp_path: Path, lost: Collection[int], runs: int = 5) -> Verdict:
    """The verdict on a gap early in the runs, of which the last ``runs`` of mxfp4 have lost these iterations."""
    paths = []
    for seed in range(1, 6):
        paths.append(write_run(tmp_path / f"bf16-{seed}", "bf16", seed))
        paths.append(write_run(tmp_path / f"mxfp4-{seed}", "mxfp4", seed, 3.7 + 1e-4 * seed))
        if seed > 5 - runs:
            lose(paths[-1], lost)
    test = gap_is("above", 0.0, quantity="training_loss", over=[0.05, 0.2])
    return judged(claims(tmp_path, test, smallest=0.01), *paths)


def test_training_losses_are_compared_over_equal_iterations(tmp_path: Path) -> None:
    """The loss falls by nats in these iterations, so over others the mean would differ by about one."""
    (finding,) = early(tmp_path, range(22, 50)).findings
    assert finding.measured == pytest.approx(3e-4, abs=1e-9)


def test_a_run_that_lacks_most_of_the_losses_is_left_out(tmp_path: Path) -> None:
    (finding,) = early(tmp_path, range(22, 81), 1).findings
    assert finding.measured == pytest.approx(2.5e-4, abs=1e-9)
    assert "4 and 4 seeds" in finding.words
    assert early(tmp_path / "all", range(22, 81)).outcome is Outcome.NOT_TESTED


@pytest.mark.parametrize("rows", [False, True], ids=["not finite", "lost"])
def test_a_run_says_how_many_losses_it_lacks(tmp_path: Path, rows: bool) -> None:
    (group,) = groups(lose(write_run(tmp_path / "run"), range(22, 81), rows=rows))
    assert group.runs[0].why == "400 iterations; training losses lost or not finite on the way: 59"


def series(*losses: float) -> Series:
    return np.arange(1, len(losses) + 1), np.array(losses)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ([3.0] * 10 + [math.nan] + [4.0] * 9, 66 / 19),
        ([math.nan] * 10 + [4.0] * 10, 4.0),
        ([math.nan] * 11 + [4.0] * 9, math.nan),
        ([4.0] * 19 + [math.nan], math.nan),  # diverged
        ([], math.nan),
    ],
)
def test_the_final_training_loss_is_of_finite_ones(last: list[float], expected: float) -> None:
    curve = Curve(series(*([9.0] * 50 if last else []), *last), series())
    assert curve.final_train == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("name", ["training", "validation"])
def test_a_divergence_begins_after_the_last_finite_loss(name: str) -> None:
    broken, whole = series(5.0, math.nan, 4.0, math.nan, math.inf), series(5.0, 5.0, 4.0, 4.0, 4.0)
    curve = Curve(broken, whole) if name == "training" else Curve(whole, broken)
    status, why = how_it_ended(curve, 5, 0.5)
    assert status is Status.DIVERGED
    assert why.startswith(f"{name} loss not finite from iteration 4; ended at iteration 5 of 5")
    never = Curve(series(math.nan, math.nan), series())
    assert how_it_ended(never, 2, 0.5)[1] == "training loss not finite from iteration 1; ended at iteration 2 of 2"
