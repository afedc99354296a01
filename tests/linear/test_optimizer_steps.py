"""The end of a step of converted layers, whose optimizers step within others and run closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec import convert
from megatron_lowprec.linear.layer_histories import LayerGroup
from tests.linear.test_convert_torch import Outer


class WithClosure(Outer):
    """``passes``: the inner optimizer gets the closure; else it steps behind that."""

    passes = True

    def step(self, closure: Any = None) -> Any:
        self.communicated = False
        if self.passes:
            loss = self.inner.step(closure)
        else:
            loss = closure()
            self.inner.step()
        self.communicated = True
        return loss


class Case:
    """A converted model, and whether ``optimizer`` had communicated at the end of each of its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passes: bool = True) -> None:
        self.model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8_delayed").train()
        self.optimizer = WithClosure(list(self.model.parameters()), list(self.model[0].parameters()))
        self.optimizer.passes = passes
        self.ends: list[bool] = []
        end_step = LayerGroup.end_step

        def recording(group: LayerGroup) -> None:
            self.ends.append(self.optimizer.communicated)
            end_step(group)

        monkeypatch.setattr(LayerGroup, "end_step", recording)

    def closure(self, scale: float = 1.0) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(8, 64) * scale).sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_step_with_a_closure_ends_after_the_outer_one(
    monkeypatch: pytest.MonkeyPatch, passes: bool, by_name: bool
) -> None:
    case = Case(monkeypatch, passes)
    for count in (1, 2):
        loss = case.optimizer.step(closure=case.closure) if by_name else case.optimizer.step(case.closure)
        assert loss.requires_grad
        assert case.ends == [True] * count


def raises() -> None:
    raise KeyboardInterrupt


def breaks(case: Case) -> None:
    """The inner step raises behind the closure."""
    groups, case.optimizer.inner.param_groups = case.optimizer.inner.param_groups, None  # type: ignore[assignment]
    try:
        case.optimizer.step(case.closure)
    finally:
        case.optimizer.inner.param_groups = groups


@pytest.mark.parametrize("failing", [lambda case: case.optimizer.step(raises), breaks])
@pytest.mark.parametrize("again", [True, False])
def test_a_step_ends_behind_one_that_raised(
    monkeypatch: pytest.MonkeyPatch, failing: Callable[[Case], None], again: bool
) -> None:
    """The same optimizer, or another in its place: both run passes in closures alone."""
    case = Case(monkeypatch)
    with pytest.raises((KeyboardInterrupt, TypeError)):
        failing(case)
    optimizer = case.optimizer if again else torch.optim.SGD(case.model.parameters(), lr=0.1)
    for count in (1, 2):
        optimizer.step(case.closure)
        assert len(case.ends) == count


@pytest.mark.parametrize("passes", [True, False])
def test_a_step_in_a_closure_of_another_model_s_optimizer_ends(monkeypatch: pytest.MonkeyPatch, passes: bool) -> None:
    case = Case(monkeypatch)
    other = nn.Linear(64, 1)
    if not passes:
        case.closure()

    def closure() -> torch.Tensor:
        case.optimizer.step(case.closure if passes else lambda: None)
        loss: torch.Tensor = other(torch.ones(8, 64)).sum()
        loss.backward()
        return loss

    torch.optim.SGD(other.parameters(), lr=0.1).step(closure)
    assert case.ends == [True]


def test_a_closure_gets_its_arguments() -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return closure(2.0, more=1)

    layer = convert(nn.Sequential(nn.Linear(64, 64)), "fp8_delayed")
    assert Scaled(layer.parameters(), lr=0.1).step(lambda scale, more: scale + more) == 3.0
