"""The bytes of FP8 primary weights, as the plan counts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowprec import get_recipe
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.training import loop
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.memory.plan import plan
from tests.training.conftest import Drive
from tests.training.helpers import argv
from tests.training.primary_weights.cases import COMMON, FLAG


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("fp8_current_bf16_ends", {"num_layers": 3, "hidden_size": 64}),  # one layer of three is in FP8
        ("fp8_blockwise", {"num_layers": 1, "hidden_size": 128}),
    ],
)
def test_the_plan_counts_their_bytes(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, recipe: str, options: dict[str, int]
) -> None:
    linear = 12 * options["hidden_size"] ** 2  # weights in FP8
    scales = 8 * linear // 128**2 if recipe == "fp8_blockwise" else 0
    held = []

    def step(trainer: Any, *rest: Any, inner: Any = loop.train_step) -> Any:
        (chunk,) = trainer.chunks
        held.append(sum(bytes_of(w) for w in chunk.parameters()))
        buffers = {b.param_data.untyped_storage().data_ptr(): b.param_data.nbytes for b in chunk.buffers}
        held.append(sum(buffers.values()))
        return inner(trainer, *rest)

    monkeypatch.setattr(loop, "train_step", step)
    flags = argv(save="out", recipe=recipe, **COMMON | FLAG | {"train_iters": 1} | options)
    drive([*flags, "--no-save"])
    config = resolve_run(resolve_model(parse(flags)[0]), 1, gpus=False)
    numerics = get_recipe(recipe)
    found = plan(config, numerics, 256, 1)
    assert found.resident["weights"] == held[0]
    assert held[0] <= held[1] + scales < 1.02 * held[0]  # padded to whole buckets
    assert found.resident["kept quantized weights"] == linear  # a transposed copy for two microbatches
    assert plan(config, numerics, 256, 1, arch="cpu").resident["kept quantized weights"] == 0
    ordinary = plan(replace(config, fp8_param_gather=False), numerics, 256, 1).resident
    assert ordinary["weights"] - found.resident["weights"] == linear - scales
    assert ordinary["kept quantized weights"] == 2 * linear
    each_time = replace(config, no_cache_weights=True)
    assert plan(each_time, numerics, 256, 1).resident["kept quantized weights"] == 0
    saving = replace(config, save_memory=True)
    assert plan(saving, numerics, 256, 1).resident["kept quantized weights"] == linear
    unstored = plan(replace(saving, fp8_param_gather=False), numerics, 256, 1).resident
    assert unstored["kept quantized weights"] == 0  # each microbatch casts its weights


def bytes_of(weight: torch.Tensor) -> int:
    if not isinstance(weight, Fp8Weight):
        return weight.nbytes
    blocks = (weight.decode_scale, weight.main_amax) if weight.spec.block else ()
    return weight.codes.nbytes + sum(each.nbytes for each in blocks)
