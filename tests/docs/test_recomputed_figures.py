"""Main figures of result pages, computed again from the archived columns without the report's code."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
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


ONE_MACHINE = (1242, 1244, 1245)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("archive", "section", "seeds"),
    [
        ("25m", "parameters, one epoch", range(1234, 1238)),
        ("25m-one-machine", "parameters on one machine", ONE_MACHINE),
    ],
)
def test_gaps_of_mxfp8_operands_at_25m(archive: str, section: str, seeds: Sequence[int]) -> None:
    ends = {
        run.rpartition("/")[2]: [row["lm loss validation"] for row in rows if "lm loss validation" in row][-1]
        for run, rows in metrics(f"mxfp8-operands/{archive}.tar.xz").items()
    }
    page = (RESULTS / "mxfp8-operands.md").read_text(encoding="utf-8").partition(f"## 25M {section}")[2]
    labels = {"mxfp8", "forward_input", *(["backward"] if len(seeds) == 4 else [])}  # one of three was not finished
    for label in labels:
        gap = mean(ends[f"gpt_25m-{label}-s{seed}"] - ends[f"gpt_25m-bf16-s{seed}"] for seed in seeds)
        finished = f"{len(seeds)} of {len(seeds)}"
        assert f"| {label} | {finished} | {gap:+.4f} |".replace("-0", "\N{MINUS SIGN}0") in page


@pytest.mark.slow
@pytest.mark.parametrize("label", ["qkv", "proj", "fc1", "fc2"])
def test_gaps_of_one_kind_of_layer_at_3m(label: str) -> None:
    ends = {
        run.rpartition("/")[2]: [row["lm loss validation"] for row in rows if "lm loss validation" in row][-1]
        for run, rows in metrics("mxfp8-operands/3m-layers.tar.xz").items()
    }
    gap = mean(ends[f"gpt_3m-mxfp8_{label}_input-s{seed}"] - ends[f"gpt_3m-bf16-s{seed}"] for seed in (1234, 1235))
    assert cells("mxfp8-operands.md", f"mxfp8_{label}_input")[2] == f"{gap:+.4f}"


@pytest.mark.parametrize(
    ("file", "section", "seeds"),
    [
        ("evaluations-25m", "parameters, one epoch", range(1234, 1238)),
        ("evaluations-25m-one-machine", "parameters on one machine", ONE_MACHINE),
    ],
)
def test_scores_of_mxfp8_operands_at_25m(file: str, section: str, seeds: Sequence[int]) -> None:
    scores = json.loads((RESULTS / f"mxfp8-operands/{file}.json").read_text())["scores"]
    losses = {(s["evaluated"], s["seed"]): s["loss"] for s in scores if s["trained"] == "forward_input" and
              s["text"] == "enwiki-test"}  # fmt: skip
    differences = [losses["mxfp8_input", seed] - losses["bf16", seed] for seed in seeds]
    page = (RESULTS / "mxfp8-operands.md").read_text(encoding="utf-8").partition(f"## 25M {section}")[2]
    row = f"{mean(differences):+.4f} | {min(differences):+.4f} | {max(differences):+.4f} |"
    line = next(line for line in page.splitlines() if line.startswith("| forward_input | mxfp8_input | enwiki-test |"))
    assert line.endswith(row)
