"""``build_optimizer`` with an inner optimizer whose own options are left out."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from megatron_lowprec.mcore.optim.recipe_optimizer import build_optimizer
from megatron_lowprec.training.options.optimizer_options import MuonOptions, OptimizerOptions
from tests.mcore.one_process import one_process
from tests.mcore.spec_loop import tracked


@pytest.mark.parametrize("inner", ["muon", "sgd"])
def test_options_that_are_left_out_are_the_driver_s_defaults(inner: str) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    defaults = asdict(OptimizerOptions()) | asdict(MuonOptions())
    own = {name.removeprefix(f"{inner}_"): defaults[name] for name in defaults if name.startswith(f"{inner}_")}
    found = []
    with one_process():
        for options in (None, own):
            model = tracked("bf16")
            chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
            config = OptimizerConfig(optimizer="adam", lr=1e-2)
            optimizer, _ = build_optimizer([chunk], "bf16", config, seed=1, inner=inner, inner_options=options)
            for weight in chunk.parameters():
                weight.main_grad.copy_(torch.linspace(-1, 2, weight.numel()).sin().view(weight.shape))
            for _ in range(2):  # the first has no momentum yet
                optimizer.step()
            found.append([weight.detach().clone() for weight in chunk.parameters()])
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
