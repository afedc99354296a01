"""One HTML page of the experiments in a folder and of runs' telemetry; megatron-lowprec lab report writes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import read_json
from megatron_lowprec.report import html
from megatron_lowprec.report.operand_plots import QUANTITIES, draw
from megatron_lowprec.report.operands import KINDS, OUTPUTS, Kind, Row, median, read_all_rows
from megatron_lowprec.text_tables import Column, plain_table

NAME = "report.html"
_OF_OUTPUTS = ("snr", "bias", "gradient_to_noise")
_WIDEST = 400  # rows of a table in the page; the JSON has all


@dataclass(frozen=True)
class Figure:
    """A PNG and the words below it."""

    caption: str
    png: bytes


@dataclass(frozen=True)
class Cells:
    """A table of text, by the names that the template reads; columns in ``left`` are words."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: frozenset[str]

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        return plain_table(self.columns, self.rows, self.left)


@dataclass
class Section:
    """An experiment or a run."""

    id: str
    title: str
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Cells] = field(default_factory=list)


def write(out: Path, runs: Sequence[Path]) -> Path:
    """Write the page about the experiments in ``out`` and about the runs; returns its path.

    Raises:
        UserError: neither experiments nor runs, a file that is no experiment's, or a run without telemetry.
    """
    sections = [*experiments(out), *(telemetry(run) for run in runs)]
    if not sections:
        raise UserError(
            f"--out {out} holds no experiments, and no run is named: run megatron-lowprec lab all --out {out} "
            "first, or name folders of runs with --log-quantization-interval"
        )
    path = out / NAME
    template = Path(__file__).with_name("page.html.jinja")
    path.write_text(html.page(template, title="Numerics", sections=sections), encoding="utf-8")
    return path


def experiments(folder: Path) -> Iterator[Section]:
    """A section for each experiment whose files are in the folder, by name."""
    for path in sorted(folder.glob("*.json")):
        try:
            content = read_json(path, "")
            tables = [_cells(table) for table in content["tables"].values()]
            notes = [*content["notes"], ", ".join(f"{name} {value}" for name, value in content["header"].items())]
            title = str(content["title"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} was not written by megatron-lowprec lab; name another --out") from None
        pngs = sorted([*folder.glob(f"{path.stem}.png"), *folder.glob(f"{path.stem}-*.png")])
        figures = [Figure(f"{title}: {png.stem}", png.read_bytes()) for png in pngs]
        yield Section(path.stem, title, notes, figures, tables)


def telemetry(run: Path) -> Section:
    """Heat maps of layers by iterations, and medians of the last iteration under each recipe.

    Raises:
        UserError: the run has no rows.
    """
    rows = read_all_rows(run / "quantization.jsonl", print)
    if not rows:
        raise UserError(f"{run} has no rows of quantization.jsonl: train with --log-quantization-interval N")
    section = Section(f"run-{run.name}", f"Run {run.name}")
    own = [row for row in rows if "recipe" not in row]
    for kinds, title, shown in ((KINDS, "operands", QUANTITIES), (OUTPUTS, "GEMM outputs", _OF_OUTPUTS)):
        part = [row for row in own if _kind(row) in kinds]
        for what in shown:
            if any(row.get(what) for row in part):  # what is zero everywhere has no heat map
                words = QUANTITIES[what].title
                section.figures.append(Figure(f"{title}: {words}", draw(words, part, what)))
    last = max(row["iteration"] for row in rows)
    section.notes.append(f"{len(own)} rows, {len({row['linear'] for row in own})} linear layers, to iteration {last}")
    section.tables.append(_medians(last, [row for row in rows if row["iteration"] == last]))
    return section


def _kind(row: Row) -> Kind:
    return row["gemm"], row["operand"]


def _medians(iteration: int, rows: Sequence[Row]) -> Cells:
    """Median SNR over layers of each operand and output: a line a recipe, the run's own first."""
    kinds = [kind for kind in (*KINDS, *OUTPUTS) if any(_kind(row) == kind for row in rows)]
    recipes = sorted({row.get("recipe", "") for row in rows})
    lines = []
    for recipe in recipes:
        found = [row for row in rows if row.get("recipe", "") == recipe]
        middles = [median(row["snr"] for row in found if _kind(row) == kind) for kind in kinds]
        lines.append([recipe or "the run's", *("-" if math.isnan(value) else f"{value:.1f}" for value in middles)])
    columns = ["recipe", *(f"{gemm}\n{operand}" for gemm, operand in kinds)]
    return Cells(f"SNR in dB at iteration {iteration}, median over layers", columns, lines, frozenset({"recipe"}))


def _cells(table: Mapping[str, Any]) -> Cells:
    columns = [Column(**column) for column in table["columns"]]
    rows = [[column.text(row) for column in columns] for row in table["rows"][:_WIDEST]]
    title = str(table["title"])
    if len(table["rows"]) > _WIDEST:
        title += f" (the first {_WIDEST} of {len(table['rows'])} rows)"
    return Cells(title, [c.heading for c in columns], rows, frozenset(c.heading for c in columns if not c.form))
