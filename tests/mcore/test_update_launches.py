"""Launches of an update do not grow with the number of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_lowprec.kernels.partial_cast.reference import Shard
from megatron_lowprec.mcore.optim import fp8_param_gather
from megatron_lowprec.mcore.optim.fp8_param_gather import quantize_main_weights
from megatron_lowprec.mcore.optim.optimizer_step import optimizer_step
from megatron_lowprec.quantization import primary_weight
from tests.mcore.built_trainers import Build, build

_ = build  # a fixture
# what Python calls and nothing runs for
VIEWS = ("view", "detach", "slice", "alias", "to", "empty", "split")


def launches(step: Callable[[], object]) -> tuple[int, int]:
    """(calls of torch's functions that compute, waits for a number) in ``step``, by Python."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    outermost = [e.name for e in profiled.events() if e.cpu_parent is None and e.name.startswith("aten::")]
    return sum(name.removeprefix("aten::") not in VIEWS for name in outermost), outermost.count("aten::item")


@pytest.mark.parametrize("distributed", [False, True])
def test_launches_do_not_grow_with_the_number_of_weights(build: Build, distributed: bool) -> None:
    """A layer has 12 weights; Megatron-core's own step is counted beside it."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for layers in (2, 6):
        trainer = build(bf16=True, use_distributed_optimizer=distributed or None, num_layers=layers)
        optimizer = trainer.optimizer
        optimizer_step(optimizer)  # makes Adam's state
        found["ours", layers] = launches(lambda optimizer=optimizer: optimizer_step(optimizer))  # type: ignore[misc]
        for part in optimizer.chained_optimizers:
            del part._copy_main_params_to_model_params
        found["stock", layers] = launches(optimizer.step)
    assert found["ours", 6] == found["ours", 2], found
    assert found["ours", 6][1] == 0
    computing, waiting = (found["stock", 6][i] - found["stock", 2][i] for i in range(2))
    assert computing >= 4 * 12, found
    assert waiting == 4 * 12, found


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_blockwise"])
def test_casts_of_fp8_weights_do_not_grow_with_their_number(
    build: Build, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Around cast and amaxes of blocks themselves, which references compute one by one and kernels at once."""
    casts: list[int] = []
    for name in ("multi_tensor_cast_", "partial_cast_"):
        monkeypatch.setattr(primary_weight, name, lambda values, *_: casts.append(len(values)))

    def partial_amax(shards: Sequence[Shard], block: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(sum(math.prod(shard.blocks(block)) for shard in shards))

    monkeypatch.setattr(fp8_param_gather, "partial_amax", partial_amax)
    found = []
    for layers in (2, 6):
        trainer = build(
            bf16=True,
            use_distributed_optimizer=True,
            fp8_param_gather=True,
            num_layers=layers,
            recipe=recipe,
            hidden_size=128,
        )
        (part,) = trainer.optimizer.chained_optimizers
        casts.clear()
        found.append(launches(lambda part=part: quantize_main_weights(part, ahead=True)))  # type: ignore[misc]
        assert casts == [4 * layers]
    assert found[0] == found[1]
    assert found[0][1] == 0
