"""A step ends with an optimizer of the model's own weights, and with no other's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch import nn

from megatron_lowprec.mcore.optim.recipe_optimizer import torch_optimizers
from megatron_lowprec.mcore.step_tracker import may_update
from tests.mcore.built_trainers import Build, build, kinds
from tests.mcore.one_process import one_process
from tests.mcore.spec_loop import MICROBATCHES, Loop, tracked
from tests.mcore.test_frozen_layers import amaxes

_ = build  # a fixture


@pytest.fixture
def world() -> Iterator[None]:
    with one_process():
        yield


def step_of_another_model() -> None:
    other = nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "mxfp4_rht_sr"])
def test_another_model_s_update_between_microbatches_changes_nothing(
    recipe: str, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients in ``main_grad``, as apex would have it: the first of a step is written over it, others added."""
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    found = []
    for disturbed in (False, True):
        loop = Loop(tracked(recipe, gradient_accumulation_fusion=True))
        loop.model.output_layer.gradient_accumulation_fusion = False  # Megatron-core's own would call apex
        for weight in loop.model.parameters():
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        for _ in range(2):
            for microbatch in range(MICROBATCHES):
                loop.losses.append(float(loop.backward(microbatch)))
                if disturbed:
                    step_of_another_model()
            loop.optimizer.zero_grad()  # dummies, the gradients being in main_grad
            loop.optimizer.step()
        main_grads = {name: weight.main_grad for name, weight in loop.model.named_parameters()}
        found.append((loop.losses, main_grads, amaxes(loop)))
        assert loop.model.decoder.layers[0].tracker.steps == 2
    assert found[0][0] == found[1][0]
    for want, got in zip(found[0][1:], found[1][1:], strict=True):
        assert [name for name in want if not torch.equal(got[name], want[name])] == []


@kinds
def test_megatron_core_s_optimizers_belong_to_their_model(build: Build, kind: dict[str, Any]) -> None:
    """They hold flat parts of fp32 weights, and fp32 copies of others."""
    mine, other = build(**kind), build(**kind)
    for trainer, foreign in ((mine, other), (other, mine)):
        optimizers = torch_optimizers(trainer.optimizer)
        assert optimizers
        assert all(may_update(optimizer, trainer.chunks) for optimizer in optimizers)
        assert not any(may_update(optimizer, foreign.chunks) for optimizer in optimizers)


def test_an_optimizer_of_a_part_and_one_with_unknown_copies() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)

    def updates(*tensors: torch.Tensor) -> bool:
        return may_update(torch.optim.SGD([{"params": tensors}], lr=0.1), [model])

    assert updates(model[1].bias)
    assert not updates(other.weight, other.bias)
    assert updates(torch.zeros(2, 2, requires_grad=True))  # a copy of another library, of whatever
    assert updates()  # a rank without a part
    model.requires_grad_(False)
    assert updates(other.weight)  # as a probe behind a frozen model


@pytest.mark.parametrize("frozen", [False, True])
def test_a_head_s_optimizer_ends_the_steps_of_the_layers(frozen: bool, world: None) -> None:
    loop = Loop(tracked("fp8_delayed"))
    if frozen:
        loop.model.decoder.requires_grad_(False)
    loop.optimizer = torch.optim.SGD(loop.model.output_layer.parameters(), lr=0.1)
    for _ in range(2):
        loop.run(indexed=False)
    layer = loop.model.decoder.layers[0]
    assert layer.tracker.steps == 2
    assert layer.mlp.linear_fc1.get_extra_state()["input"][0] > 0


def test_updates_within_the_backward_pass_end_the_step_behind_it(world: None) -> None:
    """An optimizer for each weight, which steps as soon as its gradient exists: those of one step see one scale."""
    found = []
    for within in (False, True):
        loop = Loop(tracked("fp8_delayed"))
        weights = list(loop.model.parameters())
        optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
        for weight, optimizer in zip(weights, optimizers, strict=True):
            if within:
                weight.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for _ in range(3):
            loop.optimizer.zero_grad()
            loop.losses.append(float(loop.backward(0)))
            if not within:
                loop.optimizer.step()
        found.append((loop.losses, loop.state()))
        assert loop.model.decoder.layers[0].tracker.steps == 3
    assert found[0][0] == found[1][0]
    assert [name for name, state in found[0][1].items() if not torch.equal(found[1][1][name], state)] == []
