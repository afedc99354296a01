"""An experiment's conditions and its result: tables as JSON and text, figures as PNG."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_lowprec.quantization.random_stream import Purpose, RandomStream, RngStep, stream_key
from megatron_lowprec.text_tables import Column, Row, render
from megatron_lowprec.training.monitoring.run_metadata import commit

_INNERMOST = re.compile(r"\{[^{}]*\}")  # objects of a JSON text that hold no others
_FORMS = {"below": ".3f", "error": ".2e"}  # of a pivot's numbers; others are dB


@dataclass(frozen=True)
class Lab:
    """Device, seed and size of all experiments.

    Attributes:
        quick: a smoke test with few samples of short vectors.
        draw: number of the draw of signs and of stochastic rounding.
    """

    device: torch.device
    seed: int
    quick: bool = False
    draw: int = 0

    def at(self, draw: int) -> Lab:
        """The same operands with other draws of signs and of stochastic rounding."""
        return replace(self, draw=draw)

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        """Standard normal numbers, float64, drawn on the CPU from a stream of their own."""
        return torch.randn(shape, generator=self._generator(name), dtype=torch.float64).to(self.device)

    def uniform(self, name: str, *shape: int) -> torch.Tensor:
        """Uniform numbers in [0, 1), float64, drawn on the CPU from a stream of their own."""
        return torch.rand(shape, generator=self._generator(name), dtype=torch.float64).to(self.device)

    def stream(self, operand: str) -> RandomStream:
        """Draws of stochastic rounding (``operand`` named) or of a transform's signs (``operand`` empty)."""
        purpose: Purpose = "rounding" if operand else "sign"
        key = stream_key(self.seed, purpose, layer=1, linear="lab", gemm="fprop", operand=operand)
        return RandomStream(key, RngStep(0, self.draw))

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class Table:
    """Name in the JSON file, title, columns and rows; a row maps a column's key to a number, a text or None."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]


@dataclass
class Result:
    """Tables and figures of an experiment.

    Attributes:
        notes: settings and sources, one a line.
        figures: suffix of the file's name -> PNG bytes; "" for the only or the first one.
        rows: everything measured, for the JSON only.
    """

    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    figures: Mapping[str, bytes]
    rows: Sequence[Row] = field(default_factory=list)


def pivot(rows: Sequence[Row], key: str, title: str, fixed: Mapping[str, object], across: str) -> Table:
    """``key`` of the rows that agree with ``fixed``: a line a ``name``, a column a value of ``across``.

    The title continues with ``fixed`` and ``across``, and the name is made of the same: "energy-length-4096".
    """
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        if all(row[name] == value for name, value in fixed.items()):
            table.setdefault(row["name"], {"name": row["name"]})[str(row[across])] = row[key]
    heads = [head for head in next(iter(table.values())) if head != "name"]
    form = _FORMS.get(key, ".1f")
    columns = (Column("name", "case"), *(Column(head, head, form) for head in heads))
    given = [f"{name} {value}" for name, value in fixed.items()]
    return Table(
        "-".join([key, *given]).replace(" ", "-"),
        ", ".join([title, *given, f"by {across}"]),
        columns,
        list(table.values()),
    )


def header(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """Command, device, versions and commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {
        "command": " ".join(command),
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit() or "unknown",
    }


def write(result: Result, path: Path, conditions: Mapping[str, Any]) -> None:
    """Write ``path``.json, ``path``.txt, and ``path``.png for the figure without a suffix."""
    tables = {
        table.name: {
            "title": table.title,
            "columns": [asdict(column) for column in table.columns],
            "rows": [_finite(row) for row in table.rows],
        }
        for table in result.tables
    }
    assert len(tables) == len(result.tables), "two tables of one name"
    content: dict[str, Any] = {"title": result.title, "header": dict(conditions), "notes": list(result.notes)}
    content["tables"] = tables
    if result.rows:
        content["rows"] = [_finite(row) for row in result.rows]
    text = _INNERMOST.sub(lambda match: " ".join(match[0].split()), json.dumps(content, indent=1))  # a row a line
    path.with_name(f"{path.name}.json").write_text(text + "\n", encoding="utf-8")
    lines = [result.title, ", ".join(f"{name} {value}" for name, value in conditions.items()), "", *result.notes]
    for table in result.tables:
        lines += ["", table.title, render(table.rows, table.columns)]
    path.with_name(f"{path.name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for suffix, png in result.figures.items():
        path.with_name(f"{path.name}{suffix}.png").write_bytes(png)


def _finite(row: Row) -> dict[str, Any]:
    """The row for JSON: six digits of a number, and no Inf or NaN, which JSON lacks."""
    return {key: _number(value) if isinstance(value, float) else value for key, value in row.items()}


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
