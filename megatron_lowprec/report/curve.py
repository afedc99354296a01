"""Reads columns of metrics.jsonl, and from their losses how a run ended."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.monitoring.metrics_file import read_metrics

TRAIN, VALIDATION = "lm loss", "lm loss validation"
SAMPLES, SECONDS, SKIPPED, NORM = "consumed samples", "iteration-time", "skipped iterations", "grad-norm"
COLUMNS = (TRAIN, VALIDATION, SAMPLES, SECONDS, SKIPPED, NORM)
"""The columns of metrics.jsonl that reports read."""
LAST = 20  # iterations over which the final training loss is averaged

Floats = npt.NDArray[np.float64]
Series = tuple[npt.NDArray[np.int64], Floats]


class Status(Enum):
    """Final status of a run."""

    FINISHED = "finished"
    DIVERGED = "diverged"
    UNFINISHED = "unfinished"
    FAILED = "failed"
    NOT_STARTED = "not started"  # a job of a sweep without a folder


@dataclass(frozen=True)
class Curve:
    """Training and validation losses in nats a token, each with its iterations."""

    train: Series
    validation: Series

    @property
    def final_train(self) -> float:
        """Mean of the finite training losses in the last iterations; NaN if over half or the very last are not."""
        losses = self.train[1][-LAST:]
        finite = losses[np.isfinite(losses)]
        known = len(losses) and math.isfinite(losses[-1]) and 2 * len(finite) >= len(losses)
        return float(finite.mean()) if known else math.nan

    @property
    def final_validation(self) -> float:
        """The last validation loss; NaN without any."""
        losses = self.validation[1]
        return float(losses[-1]) if len(losses) else math.nan

    @property
    def last_iteration(self) -> int:
        """The last iteration of training or validation; 0 without any."""
        return int(max(max(series[0], default=0) for series in (self.train, self.validation)))


def read_columns(path: Path, keys: Sequence[str], say: Callable[[str], None]) -> dict[str, Series]:
    """Columns of a metrics.jsonl. If a resumed run repeated an iteration, the later values count.

    ``say`` is called with a message about lines that are no rows, which are dropped.

    Raises:
        UserError: no such file, or as ``json_lines``.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; name the folder of a run that has trained")
    found: dict[str, dict[int, float]] = {key: {} for key in keys}
    for row in read_metrics(path, say):
        for key, values in found.items():
            if key in row:
                values[row["iteration"]] = float(row[key])
    return {key: _series(values) for key, values in found.items()}


def curve_of(columns: dict[str, Series], path: Path) -> Curve:
    """The losses from ``read_columns``; UserError if there are none."""
    if not len(columns[TRAIN][0]) and not len(columns[VALIDATION][0]):
        raise UserError(f"{path} holds no loss yet; train for an iteration at least")
    return Curve(columns[TRAIN], columns[VALIDATION])


def read_curve(path: Path, say: Callable[[str], None]) -> Curve:
    """Losses of a metrics.jsonl; as ``read_columns`` and ``curve_of``."""
    return curve_of(read_columns(path, (TRAIN, VALIDATION), say), path)


def typical_seconds(seconds: Series) -> float:
    """Median time of an iteration over the second half; NaN without any."""
    later = seconds[1][len(seconds[1]) // 2 :]
    return float(np.median(later)) if len(later) else math.nan


def shared(series: Sequence[Series]) -> tuple[npt.NDArray[np.int64], list[Floats]]:
    """The iterations with a finite loss in all of these series, and each one's losses there."""
    kept = [_finite(each) for each in series]
    common = reduce(np.intersect1d, [iterations for iterations, _ in kept]) if kept else np.zeros(0, np.int64)
    return common, [losses[np.isin(iterations, common)] for iterations, losses in kept]


def _finite(series: Series) -> Series:
    kept = np.isfinite(series[1])
    return series[0][kept], series[1][kept]


def smooth(series: Series, reach: int) -> Series:
    """Moving average over ``reach`` finite values on either side; fewer in a short series.

    Both ends are dropped: a mean over fewer values would show the noise of a single iteration as a turn of the curve.
    """
    iterations, values = _finite(series)
    reach = min(reach, max(0, len(values) - 1) // 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    width = 2 * reach + 1
    return iterations[reach : len(values) - reach], (sums[width:] - sums[:-width]) / width


def _series(values: dict[int, float]) -> Series:
    iterations = sorted(values)
    return np.array(iterations, np.int64), np.array([values[i] for i in iterations], np.float64)


def how_it_ended(curve: Curve, train_iters: int, diverged_rise: float) -> tuple[Status, str]:
    """Status of a run from its losses only, and a short explanation.

    Diverged: the last training or validation loss is not finite, or the mean of the last training losses is more than
    ``diverged_rise`` nats above the lowest earlier mean over as many iterations. Unfinished: it has no training loss,
    or its last iteration or last validation comes before ``train_iters``. The explanation counts the training losses
    that are lost or not finite although a finite one follows.
    """
    status, why = _ending(curve, train_iters, diverged_rise)
    finite, _ = _finite(curve.train)
    lost = int(finite[-1] - curve.train[0][0]) + 1 - len(finite) if len(finite) else 0
    return status, f"{why}; training losses lost or not finite on the way: {lost:,}" if lost else why


def _ending(curve: Curve, train_iters: int, diverged_rise: float) -> tuple[Status, str]:
    at = f"at iteration {curve.last_iteration:,} of {train_iters:,}"
    for name, (iterations, losses) in (("training", curve.train), ("validation", curve.validation)):
        if len(losses) and not math.isfinite(losses[-1]):
            first = iterations[max(np.flatnonzero(np.isfinite(losses)), default=-1) + 1]
            return Status.DIVERGED, f"{name} loss not finite from iteration {first:,}; ended {at}"
    _, finite = _finite(curve.train)
    if len(finite) > 2 * LAST:
        rise = float(finite[-LAST:].mean() - smooth(curve.train, LAST // 2)[1].min())
        if rise > diverged_rise:
            return Status.DIVERGED, f"training loss ended {rise:.2f} nats above its lowest, {at}"
    if not len(curve.train[0]):
        return Status.UNFINISHED, "no training loss logged: it only validated a checkpoint, or ended too early"
    if curve.last_iteration < train_iters:
        return Status.UNFINISHED, f"ended {at}"
    if not len(curve.validation[0]) or curve.validation[0][-1] < train_iters:
        return Status.UNFINISHED, "no validation loss at its end"
    return Status.FINISHED, f"{train_iters:,} iterations"
