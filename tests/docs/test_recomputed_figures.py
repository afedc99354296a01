"""Main figures of result pages, computed again from the archived columns without the report's code."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def metrics(archive: str) -> dict[str, list[dict[str, Any]]]:
    """Folder of a run -> rows of its metrics.jsonl."""
    with tarfile.open(RESULTS / archive) as tar:
        found = {}
        for member in tar.getmembers():
            if member.name.endswith("metrics.jsonl"):
                file = tar.extractfile(member)
                assert file is not None
                found[member.name.removesuffix("/metrics.jsonl")] = [json.loads(line) for line in file]
        return found


def cells(page: str, row: str) -> list[str]:
    """Cells of the page's first table row that begins so."""
    text = (RESULTS / page).read_text(encoding="utf-8")
    (line, *_) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
def test_norms_of_late_growth() -> None:
    for run, rows in metrics("late-growth/runs.tar.xz").items():
        last = [row for row in rows if 4200 < row["iteration"] <= 4400 and "grad-norm" in row]
        assert len(last) == 200
        shown = cells("late-growth.md", run)
        assert shown[-2] == f"{median(row['grad-norm'] for row in last):.2f}"
        assert shown[-1] == f"{mean(row['lm loss'] for row in last):.3f}"


@pytest.mark.slow
def test_gaps_of_mxfp8_operands_at_25m() -> None:
    ends = {
        run.rpartition("/")[2]: [row["lm loss validation"] for row in rows if "lm loss validation" in row][-1]
        for run, rows in metrics("mxfp8-operands/25m.tar.xz").items()
    }
    page = (RESULTS / "mxfp8-operands.md").read_text(encoding="utf-8").partition("## 25M parameters")[2]
    seeds = range(1234, 1238)
    for label in ("mxfp8", "forward_input", "backward"):
        gap = mean(ends[f"gpt_25m-{label}-s{seed}"] - ends[f"gpt_25m-bf16-s{seed}"] for seed in seeds)
        assert f"| {label} | 4 of 4 | {gap:+.4f} |".replace("-0", "\N{MINUS SIGN}0") in page


def test_scores_of_mxfp8_operands_at_25m() -> None:
    scores = json.loads((RESULTS / "mxfp8-operands/evaluations-25m.json").read_text())["scores"]
    losses = {(s["evaluated"], s["seed"]): s["loss"] for s in scores if s["trained"] == "forward_input" and
              s["text"] == "enwiki-test"}  # fmt: skip
    differences = [losses["mxfp8_input", seed] - losses["bf16", seed] for seed in range(1234, 1238)]
    page = (RESULTS / "mxfp8-operands.md").read_text(encoding="utf-8")
    row = f"{mean(differences):+.4f} | {min(differences):+.4f} | {max(differences):+.4f} |"
    (line,) = [line for line in page.splitlines() if line.startswith("| forward_input | mxfp8_input | enwiki-test |")]
    assert line.endswith(row)
