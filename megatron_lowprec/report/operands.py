"""What quantization.jsonl holds: how well each operand of a run was represented, look by look."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from megatron_lowprec.report.groups import Group
from megatron_lowprec.report.runs import Run, Status

Row = dict[str, Any]
"""A line of the file; docs/guide/quantization-error.md says what its numbers are."""

Kind = tuple[str, str]
"""A GEMM and an operand of it."""

KINDS: tuple[Kind, ...] = tuple((gemm, operand) for gemm, both in GEMM_OPERANDS.items() for operand in both)

_FIELDS = ("iteration", "linear", "gemm", "operand", "format", "amax", "snr", "bias", "underflow", "saturation")


def read_rows(path: Path) -> list[Row]:
    """All complete lines of a quantization.jsonl, which a run may be writing; none where there is no such file.

    Of an operand that a continued run looked at again in the same iteration, the later row counts.

    Raises:
        UserError: a complete line is no such row.
    """
    if not path.is_file():
        return []
    found: dict[tuple[int, str, str, str], Row] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            continue
        try:
            row = json.loads(line)
            iteration, linear, gemm, operand, *_ = (row[field] for field in _FIELDS)
            found[iteration, linear, gemm, operand] = row
            known = isinstance(iteration, int) and (gemm, operand) in KINDS
        except (ValueError, KeyError, TypeError, RecursionError):  # bytes that are no UTF-8 are a ValueError
            known = False
        if not known:
            raise UserError(f"{path}, line {number}: not a row of --log-quantization-interval")
    return list(found.values())


def full_name(row: Row) -> str:
    """Whose operand it is."""
    return f"{row['linear']} {row['gemm']} {row['operand']}"


def not_finite(rows: Iterable[Row]) -> list[Row]:
    """Those of operands that held an Inf or a NaN."""
    return [row for row in rows if row["amax"] is None]


def by_snr(rows: Iterable[Row]) -> list[Row]:
    """Those that have a signal-to-noise ratio, the lowest first."""
    return sorted((row for row in rows if row["snr"] is not None), key=lambda row: row["snr"])


def median(values: Iterable[float | None]) -> float:
    """Of those that there are; NaN without any."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else math.nan


@dataclass(frozen=True)
class Looks:
    """What the rows of one run say.

    Attributes:
        iteration: of the last look.
        last: its rows.
        snr: operand of a GEMM -> iteration -> every layer's signal-to-noise ratio in dB, where it has one.
    """

    iteration: int
    last: tuple[Row, ...]
    snr: Mapping[Kind, Mapping[int, Sequence[float]]]

    @staticmethod
    def of(rows: Sequence[Row]) -> Looks:
        """Of a run's rows, at least one."""
        iteration = max(row["iteration"] for row in rows)
        snr: dict[Kind, dict[int, list[float]]] = {}
        for row in rows:
            values = snr.setdefault((row["gemm"], row["operand"]), {}).setdefault(row["iteration"], [])
            if row["snr"] is not None:
                values.append(row["snr"])
        return Looks(iteration, tuple(row for row in rows if row["iteration"] == iteration), snr)


@dataclass(frozen=True)
class RecipeLooks:
    """The looks at a recipe's runs: at those that finished, or at all where none did."""

    label: str
    finished: bool
    runs: tuple[Looks, ...]

    @property
    def title(self) -> str:
        """Its label, marked where no run finished."""
        return self.label if self.finished else f"{self.label}, not finished"

    @property
    def kinds(self) -> list[Kind]:
        """What the recipe quantizes, in the order of ``KINDS``."""
        return [kind for kind in KINDS if any(kind in run.snr for run in self.runs)]

    @property
    def ends(self) -> list[int]:
        """The iterations of the runs' last looks, each once."""
        return sorted({run.iteration for run in self.runs})

    def last(self, kind: Kind | None = None) -> list[Row]:
        """Rows of every run's last look, of one operand or of all."""
        rows = [row for run in self.runs for row in run.last]
        return [row for row in rows if kind in (None, (row["gemm"], row["operand"]))]

    def snr(self, kind: Kind) -> dict[int, list[float]]:
        """Iteration -> every layer's and run's signal-to-noise ratio, by rising iteration."""
        series = [run.snr.get(kind, {}) for run in self.runs]
        iterations = sorted({iteration for each in series for iteration in each})
        return {at: [value for each in series for value in each.get(at, ())] for at in iterations}


def find_looks(group: Group) -> tuple[list[RecipeLooks], list[str]]:
    """Of each recipe with a run that was looked at, in the group's order, and notes about files that cannot be read."""
    found, notes = [], []
    for label in group.labels:
        looked: list[tuple[Run, Looks]] = []
        for run in group.of(label):
            try:
                rows = read_rows(run.folder / "quantization.jsonl")
            except UserError as error:
                notes.append(f"{error}; nothing of that file is shown.")
                continue
            if rows:
                looked.append((run, Looks.of(rows)))
        finished = tuple(looks for run, looks in looked if run.status is Status.FINISHED)
        if looked:
            found.append(RecipeLooks(label, bool(finished), finished or tuple(looks for _, looks in looked)))
    return found, notes
