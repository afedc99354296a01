"""The optimizer's count of updates on ranks that rank 0, whose groups of weights are saved, does not stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.once import once
from tests.training.helpers import argv, losses, many_runs

# Experts in the second of two stages only. Without the distributed optimizer, which keeps the count of its own.
LATE_EXPERTS: dict[str, Any] = {
    "num_layers": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "num_experts": 2,
    "moe_layer_freq": "[0,1]",
    "train_iters": 4,
    "save_interval": 2,
    "lr_decay_style": "constant",
}
OPTIMIZERS: dict[str, dict[str, Any]] = {"adam": {}, "muon": {"optimizer": "muon"}}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on four ranks under each optimizer, and its second half again from the checkpoint between."""

    def run(folder: Path) -> None:
        cases = []
        for name, more in OPTIMIZERS.items():
            cases.append(argv(**LATE_EXPERTS, **more, save=name))
            cases.append(argv(**LATE_EXPERTS, **more, save=f"{name} rest", load=name, ckpt_step=2))
        many_runs(4, cases, folder)

    return once(tmp_path_factory, "late_experts", run)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_experts_that_rank_0_lacks_resume_bit_for_bit(launch: Path, optimizer: str) -> None:
    assert losses(launch / f"{optimizer} rest") == losses(launch / optimizer)[2:]
