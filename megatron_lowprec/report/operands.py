"""Reads quantization.jsonl: snapshots of the quantization error of each operand of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import Row, json_lines
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from megatron_lowprec.report.curve import Status
from megatron_lowprec.report.groups import Group
from megatron_lowprec.report.runs import Run
from megatron_lowprec.training.monitoring.metrics_file import check_iteration

Kind = tuple[str, str]
"""A GEMM and one of its operands."""

KINDS: tuple[Kind, ...] = tuple((gemm, operand) for gemm, both in GEMM_OPERANDS.items() for operand in both)

OUTPUTS: tuple[Kind, ...] = tuple((gemm, "output") for gemm in GEMM_OPERANDS)
"""A GEMM and its output, on sampled rows."""

_NAMES = ("linear", "gemm", "operand", "format")
_QUANTITIES = ("amax", "snr", "bias", "underflow", "saturation")
SNAPSHOT_COLUMNS = ("iteration", *_NAMES, "recipe", *_QUANTITIES)
"""The columns of quantization.jsonl that reports read."""


def read_rows(path: Path, say: Callable[[str], None]) -> list[Row]:
    """``read_own_rows`` of operands."""
    return [row for row in read_own_rows(path, say) if _kind(row) in KINDS]


def read_own_rows(path: Path, say: Callable[[str], None]) -> list[Row]:
    """``read_all_rows`` under the run's own recipe."""
    return [row for row in read_all_rows(path, say) if "recipe" not in row]


def read_all_rows(path: Path, say: Callable[[str], None]) -> list[Row]:
    """Rows of a quantization.jsonl, whose quantities docs/guide/quantization-error.md defines; empty without a file.

    If a resumed run repeats an operand in the same iteration, the later row counts. ``say`` is called with a message
    about lines that are no rows, which are dropped.

    Raises:
        UserError: as ``json_lines``.
    """
    found = {}
    for row in json_lines(path, say, _check):
        found[row["iteration"], row["linear"], row["gemm"], row["operand"], row.get("recipe")] = row
    return list(found.values())


def _check(row: Row) -> None:
    check_iteration(row)
    names = [*(row[name] for name in _NAMES), row.get("recipe", "")]
    if any(type(name) is not str for name in names) or _kind(row) not in (*KINDS, *OUTPUTS):
        raise ValueError(f"no operand is named {names}")
    quantities = [row[name] for name in _QUANTITIES]
    others = [value for name, value in row.items() if name not in (*_NAMES, "recipe")]
    if any(type(value) not in (int, float, type(None)) for value in (*quantities, *others)):
        raise ValueError("a quantity is no number")


def full_name(row: Row) -> str:
    """Name from linear layer, GEMM and operand."""
    return f"{row['linear']} {row['gemm']} {row['operand']}"


def not_finite(rows: Iterable[Row]) -> list[Row]:
    """Rows of operands with an Inf or a NaN."""
    return [row for row in rows if row["amax"] is None]


def by_snr(rows: Iterable[Row]) -> list[Row]:
    """Rows with a signal-to-noise ratio, in ascending order."""
    return sorted((row for row in rows if row["snr"] is not None), key=lambda row: row["snr"])


def median(values: Iterable[float | None]) -> float:
    """Median of the values that are not None; NaN without any."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else math.nan


@dataclass(frozen=True)
class Snapshots:
    """Quantization-error snapshots of a recipe's runs."""

    label: str  # of the recipe
    finished: bool  # whether ``runs`` are the finished ones; all of them if none finished
    runs: tuple[Sequence[Row], ...]  # all rows of each run, at least one of an operand; older files have no outputs

    @property
    def title(self) -> str:
        """The label, marked if no run finished."""
        return self.label if self.finished else f"{self.label}, not finished"

    @cached_property
    def kinds(self) -> list[Kind]:
        """Quantized operands of the recipe, in the order of ``KINDS``."""
        found = {_kind(row) for rows in self.runs for row in rows}
        return [kind for kind in KINDS if kind in found]

    @cached_property
    def ends(self) -> list[int]:
        """Iteration of each run's last snapshot."""
        return [max(row["iteration"] for row in rows) for rows in self.runs]

    def last(self, kind: Kind | None = None) -> list[Row]:
        """Rows of every run's last snapshot, of one operand or output, or of all operands."""
        kinds = KINDS if kind is None else (kind,)
        rows = [row for end, rows in zip(self.ends, self.runs) for row in rows if row["iteration"] == end]
        return [row for row in rows if _kind(row) in kinds]

    def snr(self, kind: Kind) -> dict[int, list[float]]:
        """Iteration -> every layer's and run's signal-to-noise ratio in dB, if defined; in ascending order."""
        series: dict[int, list[float]] = {}
        for row in (row for rows in self.runs for row in rows if _kind(row) == kind):
            series.setdefault(row["iteration"], []).extend([] if row["snr"] is None else [row["snr"]])
        return dict(sorted(series.items()))


def find_snapshots(group: Group) -> tuple[list[Snapshots], list[str]]:
    """Snapshots of each recipe that has any, in the group's order, and notes about unreadable files."""
    found, notes = list[Snapshots](), list[str]()
    for label in group.labels:
        recorded: list[tuple[Run, list[Row]]] = []
        for run in group.of(label):
            said: list[str] = []
            try:
                rows = read_own_rows(run.folder / "quantization.jsonl", said.append)
            except UserError as error:
                rows, said = [], [f"{error}; nothing of that file is shown."]
            notes += map(run.named, said)
            if any(_kind(row) in KINDS for row in rows):
                recorded.append((run, rows))
        finished = tuple(rows for run, rows in recorded if run.status is Status.FINISHED)
        if recorded:
            found.append(Snapshots(label, bool(finished), finished or tuple(rows for _, rows in recorded)))
    return found, notes


def _kind(row: Row) -> Kind:
    return row["gemm"], row["operand"]
