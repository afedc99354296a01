"""Reads a published ladder of runs: gap to bf16 in nats against tokens per parameter.

megatron_lowprec/data/README.md describes the shipped file and its source.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lowprec.errors import UserError

BASELINE = "baseline"
_COLUMNS = ("group", "N", "D", "final_loss")


@dataclass(frozen=True)
class PublishedRun:
    """One published run.

    ``loss`` is its final loss and ``baseline_loss`` that of the bf16 run of the same size and tokens, in nats a token;
    ``settings`` holds the source's other columns that are not empty.
    """

    group: str
    parameters: int
    tokens: int
    loss: float
    baseline_loss: float
    settings: Mapping[str, str]

    @property
    def gap(self) -> float:
        """Loss above the bf16 run of the same size and tokens, in nats a token."""
        return self.loss - self.baseline_loss

    @property
    def tokens_per_parameter(self) -> float:
        """Training tokens over the source's number of parameters."""
        return self.tokens / self.parameters


def read_ladder(path: Path) -> list[PublishedRun]:
    """Runs of a ladder file, the bf16 runs included (gap 0), in the file's order.

    Args:
        path: CSV with columns group, N (parameters), D (tokens), final_loss (nats a token) and any settings. Rows of
            group "baseline" are the bf16 runs, one per N and D.

    Raises:
        UserError: no such file, a missing column, a value that is no finite number, or no single bf16 run for a row.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), reader.fieldnames or ()
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error}); name a file such as quartet2-runs.csv") from None
    missing = [name for name in _COLUMNS if name not in columns]
    if missing:
        raise UserError(f"{path}: no column {', '.join(missing)}; a ladder needs {', '.join(_COLUMNS)}")
    runs = [_numbers(row, f"{path}, line {line}") for line, row in enumerate(rows, 2)]
    baselines: dict[tuple[int, int], float] = {}
    for line, (row, (parameters, tokens, loss)) in enumerate(zip(rows, runs), 2):
        if row["group"] == BASELINE:
            if (parameters, tokens) in baselines:
                raise UserError(
                    f"{path}, line {line}: a second {BASELINE} of N {parameters} and D {tokens}; keep one of them"
                )
            baselines[parameters, tokens] = loss
    found = []
    for line, (row, (parameters, tokens, loss)) in enumerate(zip(rows, runs), 2):
        if (parameters, tokens) not in baselines:
            raise UserError(
                f"{path}, line {line}: no {BASELINE} of N {parameters} and D {tokens}, so no gap; add it or drop this"
            )
        settings = {name: value for name, value in row.items() if name not in _COLUMNS and value}
        found.append(PublishedRun(row["group"], parameters, tokens, loss, baselines[parameters, tokens], settings))
    return found


def gap_ladder(runs: Sequence[PublishedRun], parameters: int, **settings: str) -> list[tuple[float, float]]:
    """(tokens per parameter, gap in nats a token) of the quantized runs of one size, by rising tokens.

    Args:
        runs: from ``read_ladder``.
        parameters: the size, as the source counts it.
        settings: values that ``group`` or a settings column must have, such as group="nvidia"; an empty column
            is "". Runs that these do not tell apart all appear.
    """
    chosen = _chosen(runs, parameters, settings)
    return sorted((run.tokens_per_parameter, run.gap) for run in chosen if run.group != BASELINE)


def loss_ladder(runs: Sequence[PublishedRun], parameters: int, **settings: str) -> dict[int, float]:
    """Training tokens -> final loss in nats a token, by rising tokens; arguments as for ``gap_ladder``.

    Raises:
        UserError: two runs of equal tokens have these settings.
    """
    losses: dict[int, float] = {}
    for run in sorted(_chosen(runs, parameters, settings), key=lambda run: run.tokens):
        if run.tokens in losses:
            named = ", ".join(f"{name} {value!r}" for name, value in settings.items())
            raise UserError(
                f"{named}: two published runs of {parameters} parameters and {run.tokens} tokens have these settings; "
                "add one that tells them apart"
            )
        losses[run.tokens] = run.loss
    return losses


def _chosen(runs: Sequence[PublishedRun], parameters: int, settings: Mapping[str, str]) -> list[PublishedRun]:
    return [
        run
        for run in runs
        if run.parameters == parameters
        and all({"group": run.group, **run.settings}.get(name, "") == value for name, value in settings.items())
    ]


def _numbers(row: Mapping[str, str], where: str) -> tuple[int, int, float]:
    try:
        parameters, tokens, loss = int(row["N"]), int(row["D"]), float(row["final_loss"])
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: N, D and final_loss must be numbers ({error}); mend or remove the row") from None
    if parameters <= 0 or tokens <= 0 or not math.isfinite(loss):
        raise UserError(f"{where}: N and D must be above 0 and final_loss finite; mend or remove the row")
    return parameters, tokens, loss
