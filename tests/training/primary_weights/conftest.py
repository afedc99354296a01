"""Runs with FP8 primary weights, on two processes and on one, for all tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import fork_ranks
from tests.once import once
from tests.training.conftest import driving
from tests.training.helpers import argv
from tests.training.primary_weights.cases import COMMON, EACH_TIME, FLAG, RECIPES, WORKER, cases
from tests.training.primary_worker import Digests, looking
from tests.weekly import also_weekly


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, weekly: bool) -> Path:
    """All runs of ``cases`` on two processes, in one launch."""

    def run(folder: Path) -> None:
        command_lines = {name: argv(**{"save": name} | options) for name, options in cases(weekly).items()}
        (folder / "cases.json").write_text(json.dumps(command_lines))
        fork_ranks(2, [WORKER, "cases.json"], folder)

    return once(tmp_path_factory, "primary_weights", run)


@pytest.fixture(scope="session", params=also_weekly(RECIPES, EACH_TIME))
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Digests]:
    """A recipe, a folder with a run of it on one process, with checkpoints of iterations 2 and 4, and its digests."""
    recipe: str = request.param

    def run(folder: Path) -> None:
        with driving(folder) as call, looking() as digests:
            call(argv(save="out", save_interval=2, **COMMON, **FLAG, **RECIPES[recipe]))
        (folder / "digests.json").write_text(json.dumps(digests))

    folder = once(tmp_path_factory, f"primary_weights_of_{recipe}", run)
    return recipe, folder, json.loads((folder / "digests.json").read_text())
