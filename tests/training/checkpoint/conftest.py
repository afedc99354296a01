"""Runs with checkpoints, whole and as one lay there after an interruption, and a copy of one checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.training.checkpoint import storage
from tests.once import once
from tests.training.checkpoint.forms import common_as_file
from tests.training.conftest import driving
from tests.training.helpers import argv

COMMON: dict[str, Any] = {"save": "out", "train_iters": 6, "save_interval": 2, "lr_decay_iters": 10}


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of iterations 2, 4 and 6."""

    def run(folder: Path) -> None:
        with driving(folder) as call:
            call(argv(**COMMON))

    return once(tmp_path_factory, "whole", run) / "out"


@pytest.fixture
def interrupted(whole: Path, tmp_path: Path) -> Path:
    """The same run as it lay there after iteration 5, its newest checkpoint that of iteration 4."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    shutil.rmtree(out / "iter_0000006")
    (out / storage.TRACKER).write_text("4\n")
    metrics = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(metrics[:5]))
    return out


def newest(out: Path) -> Path:
    return out / "iter_0000004"


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    found = Path(shutil.copytree(checkpoints / "iter_0000004", tmp_path / "out" / "iter_0000004"))
    common_as_file(found)
    return found
