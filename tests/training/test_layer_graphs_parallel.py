"""--cuda-graph-impl on two processes: the bits of runs without graphs, in each layout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import fork_ranks, torchrun
from tests.training.graph_cases import EAGER, GRAPHS, KEYS, ON_GPU, OVERLAP, RECIPES, SMALL
from tests.training.helpers import argv, rows
from tests.weekly import checks_of

# gathers run under the layers; for the norm of all weights they would end before the next step
OVERLAPPED = {**OVERLAP, "global_batch_size": 8, "log_params_norm": None}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {"global_batch_size": 8},
    "data parallel, overlapped": OVERLAPPED,
    "data parallel, stored gradients": {**OVERLAPPED, "recipe": "fp8_lm_o2", "global_batch_size": 4},
    "data parallel, primary weights": {**OVERLAPPED, "fp8_param_gather": True},
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "tensor and sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "FP8 codes gathered": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "fp8_sequence_parallel_gather": True,
        "recipe": "fp8_delayed",
    },
}
LAYOUTS_WEEKLY = {"data parallel", "data parallel, overlapped", "tensor parallel"}  # parts of the others


def first_difference(folder: Path, other: Path) -> str:
    """Of two runs' exact rows, in words; empty where there is none."""
    for row, theirs in zip(rows(folder), rows(other), strict=True):
        for key in KEYS:
            if row.get(key) != theirs.get(key):
                return f"iteration {row['iteration']}: {key} {row.get(key)} and {theirs.get(key)}"
    return ""


def launch(folder: Path, script: str, cases: dict[str, dict[str, Any]], hide_gpus: bool) -> str:
    """Runs by the names of their folders, on two processes, one after the other; what they have printed."""
    (folder / "cases.json").write_text(json.dumps([argv(save=name, **options) for name, options in cases.items()]))
    if hide_gpus:
        printed = fork_ranks(2, [script, "cases.json"], folder)
    else:
        done = torchrun(2, [script, "cases.json"], folder)
        printed = done.stdout
        assert done.returncode == 0, f"{printed[-4000:]}\n--- stderr\n{done.stderr[-12000:]}"
    errors = json.loads((folder / "errors.json").read_text())
    assert errors == {}, f"{ {list(cases)[int(number)]: error for number, error in errors.items()} }"
    return printed


def check_replays(folder: Path, script: str, cases: dict[str, dict[str, Any]], hide_gpus: bool = False) -> None:
    """Each case with and without graphs, in one launch; where they differ first, and whether plain runs differ."""
    plain = {name: {"log_params_norm": True} | EAGER | options for name, options in cases.items()}
    pairs = (((f"{name}-plain", case), (f"{name}-replayed", case | GRAPHS)) for name, case in plain.items())
    printed = launch(folder, script, dict(chain(*pairs)), hide_gpus)
    assert printed.count("CUDA graphs: 3 layers captured") == len(cases), printed[-4000:]

    def different(kind: str, among: Iterable[str]) -> dict[str, str]:
        found = {name: first_difference(folder / f"{name}-plain", folder / f"{name}-{kind}") for name in among}
        return {name: where for name, where in found.items() if where}

    found = different("replayed", cases)
    if found:
        launch(folder, script, {f"{name}-again": plain[name] for name in found}, hide_gpus)
        pytest.fail(f"plain and replayed: {found}; plain and plain again: {different('again', found)}")


def test_a_difference_of_two_runs_is_named(tmp_path: Path) -> None:
    for name, last in (("one", "0x1.8p+1"), ("same", "0x1.8p+1"), ("other", "0x1.9p+1")):
        (tmp_path / name).mkdir()
        made = [{"iteration": 1, "lm loss hex": "0x1.0p+2"}, {"iteration": 2, "lm loss hex": last, "seconds": last}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made))
    assert first_difference(tmp_path / "one", tmp_path / "same") == ""
    assert first_difference(tmp_path / "one", tmp_path / "other") == "iteration 2: lm loss hex 0x1.8p+1 and 0x1.9p+1"


@pytest.mark.slow
def test_recordings_on_two_processes_have_the_bits_of_plain_runs(weekly: bool, tmp_path: Path) -> None:
    layouts = checks_of(LAYOUTS, LAYOUTS_WEEKLY, weekly)
    cases = {name: SMALL | {"recipe": "fp8_current"} | LAYOUTS[name] for name in layouts}
    check_replays(tmp_path, "tests/training/rerun_recorder.py", cases, hide_gpus=True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_on_two_gpus_have_the_bits_of_plain_runs(tmp_path: Path, layout: str) -> None:
    recipes = ["fp8_delayed", "fp8_current"] if "fp8_param_gather" in LAYOUTS[layout] else RECIPES
    recipes = [LAYOUTS[layout]["recipe"]] if "recipe" in LAYOUTS[layout] else recipes
    cases = {recipe: ON_GPU | LAYOUTS[layout] | {"recipe": recipe} for recipe in recipes}
    check_replays(tmp_path, "tests/training/bucket_runs.py", cases)
