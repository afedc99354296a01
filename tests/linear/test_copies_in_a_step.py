"""Models with delayed scaling that are copied between the backward pass and the step."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from megatron_lowprec import convert

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (model(X) - X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), "fp8_delayed")
    optimizer = sgd(model)
    train(model, optimizer, steps=2)
    return model, optimizer


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("first", ["copy", "original"])
def test_a_copy_between_the_backward_pass_and_the_step_ends_it(how: str, first: str) -> None:
    model, optimizer = trained()
    (30 * model(X) - X).square().mean().backward()
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert theirs.grad is not None
        mine.grad = theirs.grad.clone()
    own = sgd(copied)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
        order = [(copied, own), (model, optimizer)]
        losses = [train(*each, steps=3) for each in (order if first == "copy" else order[::-1])]
    assert losses[0] == losses[1]


def test_a_frozen_copy_takes_no_part_in_steps_of_its_model() -> None:
    """Only rank 0 may hold an average, and the end of a step is collective."""
    model, optimizer = trained()
    model(X).square().mean().backward()
    copied = copy.deepcopy(model).requires_grad_(False)
    before = copied.state_dict()["0.amax.input"].clone()
    optimizer.step()
    assert torch.equal(copied.state_dict()["0.amax.input"], before)
