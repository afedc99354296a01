"""Optimizers of a chain, one of which has no weights on some ranks: experts in one of two pipeline stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.once import once
from tests.training.helpers import argv, losses, many_runs
from tests.weekly import also_weekly

EXPERTS: dict[str, Any] = {
    "num_layers": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "num_experts": 2,
    "moe_layer_freq": "[0,1]",
    "train_iters": 4,
    "save_interval": 2,
    "lr_decay_style": "constant",
}
EARLY: dict[str, Any] = {"moe_layer_freq": "[1,0]", "bf16": True}
DISTRIBUTED: dict[str, Any] = {"bf16": True, "use_distributed_optimizer": True}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "distributed": DISTRIBUTED,
    "muon": {"optimizer": "muon"},
    "muon, distributed": DISTRIBUTED | {"optimizer": "muon"},
    "fp8_lm": DISTRIBUTED | {"recipe": "fp8_lm"},
    "early": EARLY,
    "early, distributed": DISTRIBUTED | EARLY,
    "early, sgd": EARLY | {"optimizer": "sgd"},  # which has no count of updates
    "early, sgd, fp32": {"moe_layer_freq": "[1,0]", "optimizer": "sgd"},
}

# Muon's part is as under the distributed optimizer, experts of the first stage as under SGD, and SGD as in bf16
EACH_TIME = OPTIMIZERS.keys() - {"muon", "early, distributed", "early, sgd, fp32"}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, weekly: bool) -> Path:
    """A run on four ranks under each optimizer, and its second half again from the checkpoint between."""

    def run(folder: Path) -> None:
        cases = []
        for name in OPTIMIZERS if weekly else filter(EACH_TIME.__contains__, OPTIMIZERS):
            options = EXPERTS | OPTIMIZERS[name]
            cases.append(argv(**options, save=name))
            cases.append(argv(**options, save=f"{name} rest", load=name, ckpt_step=2))
        many_runs(4, cases, folder)

    return once(tmp_path_factory, "experts_of_a_stage", run)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", also_weekly(OPTIMIZERS, EACH_TIME))
def test_a_run_resumes_bit_for_bit(launch: Path, optimizer: str) -> None:
    """Megatron-core saves the count of updates, and lists without weights, of rank 0 alone."""
    whole = losses(launch / optimizer)
    assert len(set(whole)) == 4
    assert losses(launch / f"{optimizer} rest") == whole[2:]
