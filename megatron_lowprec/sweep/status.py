"""State of each job of a sweep, read from its folder while the job writes to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Literal

from megatron_lowprec.sweep import job_record
from megatron_lowprec.sweep.jobs import is_scored, read_manifest
from megatron_lowprec.text_tables import plain_table
from megatron_lowprec.training.monitoring.metrics_file import read_metrics

if TYPE_CHECKING:
    from rich.table import Table

Shown = Literal["waiting", "running", "done", "unscored", "failed", "interrupted"]
LAST = 10  # iterations over which loss and speed are averaged
_TAIL = 1 << 16  # bytes; some 150 rows
_COLUMNS = ("job", "state", "iteration", "loss", "validation", "tokens/s", "took", "left")


@dataclass(frozen=True)
class Progress:
    """Progress from the end of a metrics.jsonl; losses in nats a token, ``step_seconds`` per iteration."""

    iteration: int = 0
    loss: float | None = None
    validation: float | None = None
    step_seconds: float | None = None
    step_samples: int | None = None
    dropped: str | None = None  # a line about damaged rows


@dataclass(frozen=True)
class Row:
    """A job's table row: ``seconds`` of training so far, ``left`` of training remaining."""

    id: str
    state: Shown
    progress: Progress
    train_iters: int | None
    tokens_per_second: float | None
    seconds: float
    left: float | None


def read_progress(run: Path) -> Progress:
    """Progress from the last rows; empty if there are none yet."""
    dropped: list[str] = []
    rows = list(read_metrics(run / "metrics.jsonl", dropped.append, _TAIL))
    about = next(iter(dropped), None)
    steps = [row for row in rows if "lm loss" in row][-LAST:]
    tests = [row["lm loss validation"] for row in rows if "lm loss validation" in row]
    if not steps:
        return Progress(dropped=about)
    seconds = [row["iteration-time"] for row in steps if "iteration-time" in row]
    return Progress(
        iteration=steps[-1]["iteration"],
        loss=mean(row["lm loss"] for row in steps),
        validation=tests[-1] if tests else None,
        step_seconds=median(seconds) if seconds else None,
        step_samples=steps[-1].get("batch-size"),
        dropped=about,
    )


def rows(out: Path, evaluate: Sequence[str] = ()) -> list[Row]:
    """All jobs of the sweep in ``out``, to be scored under the flags ``evaluate``; UserError if none was started."""
    return [row(out, job["id"], evaluate) for job in read_manifest(out)["cells"]]


def row(out: Path, job_id: str, evaluate: Sequence[str] = ()) -> Row:
    """The row of one job, as ``rows``."""
    run = out / job_id
    known, held = job_record.read(run), job_record.holder(out, job_id)
    if known is None:
        return Row(job_id, "waiting", Progress(), None, None, 0.0, None)
    state: Shown = known.state
    if held is not None:
        state = "running"
    elif state == "running":
        state = "interrupted"  # its process died
    elif state == "done" and evaluate and not is_scored(run, evaluate):
        state = "unscored"
    progress = read_progress(run)
    speed = left = None
    if progress.step_seconds:
        if progress.step_samples is not None:
            speed = progress.step_samples * known.seq_length / progress.step_seconds
        if known.state != "done":
            left = (known.train_iters - progress.iteration) * progress.step_seconds
    seconds = known.seconds
    if state == "running":
        seconds += max(0.0, (datetime.now().astimezone() - datetime.fromisoformat(known.started)).total_seconds())
    return Row(job_id, state, progress, known.train_iters, speed, seconds, left)


def summary(found: Sequence[Row]) -> str:
    """``3 done, 1 running, 6 waiting``."""
    counts = Counter(row.state for row in found)
    order: tuple[Shown, ...] = ("done", "unscored", "running", "failed", "interrupted", "waiting")
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state])


def lines(found: Sequence[Row]) -> list[str]:
    """The table as plain text."""
    return plain_table(_COLUMNS, [_texts(row) for row in found], rule=False)


def notes(found: Sequence[Row]) -> list[str]:
    """A line for each job with damaged rows."""
    return [row.progress.dropped for row in found if row.progress.dropped is not None]


def table(found: Sequence[Row], caption: str) -> Table:
    """The table for a terminal."""
    from rich.table import Table

    colours = {"done": "green", "running": "cyan", "failed": "red", "waiting": "dim"}  # else yellow: to be continued
    drawn = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for name in _COLUMNS:
        drawn.add_column(name, justify="left" if name in ("job", "state") else "right", no_wrap=True)
    for row in found:
        drawn.add_row(*_texts(row), style=colours.get(row.state, "yellow"))
    return drawn


def _texts(row: Row) -> tuple[str, ...]:
    progress = row.progress
    return (
        row.id,
        row.state,
        f"{progress.iteration}/{row.train_iters}" if row.train_iters else "",
        _number(progress.loss, "{:.4f}"),
        _number(progress.validation, "{:.4f}"),
        _number(row.tokens_per_second, "{:,.0f}") if row.state == "running" else "",
        duration(row.seconds) if row.seconds else "",
        duration(row.left) if row.left is not None else "",
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def duration(seconds: float) -> str:
    """``45 s``, ``2:05``, ``1:02:05``: seconds, with minutes and hours as needed."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}" if minutes else f"{whole} s"
