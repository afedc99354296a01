"""Converted models under torch's recomputation, autocast and nested optimizers."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron_lowprec import KeepBf16, convert, get_recipe
from megatron_lowprec.linear.layer_histories import LayerGroup
from tests.linear.conversions import CONVERTIBLE, EACH_TIME, gradients
from tests.linear.tiny_models import build, train
from tests.weekly import also_weekly


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr"])
def test_recomputation_changes_no_bit(name: str, how: str) -> None:
    found = []
    for each in ("", how):
        model = convert(build(recompute=each), name)
        found.append((train(model, 3), gradients(model)))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


def _gradients(name: str, run: Callable[[nn.Sequential, torch.Tensor], torch.Tensor]) -> list[Any]:
    torch.manual_seed(0)
    model = convert(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), name).train()
    run(model, torch.randn(64, 64, requires_grad=True)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def _products_are_saved(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise", "fp8_current", "mxfp8", "mxfp4_rht_sr", "nvfp4_all"])
def test_selective_checkpoints_return_the_products_of_the_first_pass(name: str) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, _products_are_saved)
    found = _gradients(name, lambda model, x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))
    assert all(map(torch.equal, found, _gradients(name, lambda model, x: model(x))))


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_nested_checkpoints_repeat_the_draws(outer: bool, inner: bool) -> None:
    """Of layers in both parts, one of them twice: within the inner part and after it."""

    def nested(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        first = functools.partial(checkpoint, lambda y: model[1](model[0](y)), use_reentrant=inner)
        return checkpoint(lambda y: model[1](model[2](first(y))), x, use_reentrant=outer)

    want = _gradients("mxfp4_rht_sr", lambda model, x: model[1](model[2](model[1](model[0](x)))))
    assert all(map(torch.equal, _gradients("mxfp4_rht_sr", nested), want))


class Outer(torch.optim.Optimizer):
    """Steps one of its own for some of its parameters, as ZeroRedundancyOptimizer does, which then communicates."""

    def __init__(self, parameters: list[nn.Parameter], inner: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(inner, lr=0.1)
        self.communicated = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.communicated = False
        self.inner.step()
        self.communicated = True


def test_a_step_ends_after_the_outer_one_of_nested_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8_delayed").train()
    optimizer = Outer(list(model.parameters()), list(model[0].parameters()))
    ends = []
    end_step = LayerGroup.end_step

    def recording(group: LayerGroup) -> None:
        ends.append(optimizer.communicated)
        end_step(group)

    monkeypatch.setattr(LayerGroup, "end_step", recording)
    for count in (1, 2):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        assert ends == [True] * count
    monkeypatch.setattr(optimizer.inner, "param_groups", None)  # raises, within both
    with pytest.raises(TypeError):
        optimizer.step()
    model(torch.randn(8, 64)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert len(ends) == 3


@pytest.mark.parametrize("name", also_weekly(CONVERTIBLE, EACH_TIME))
def test_autocast_is_the_layer_in_bf16(name: str, generator: torch.Generator) -> None:
    """The GEMMs themselves are outside autocast, also in a backward pass within it."""
    narrow, wide = (nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(2))
    wide.load_state_dict(narrow.state_dict())
    recipe = replace(get_recipe(name), keep_bf16=KeepBf16())
    convert(narrow.bfloat16(), recipe)
    convert(wide, recipe)
    x, dy = torch.randn(64, 128, generator=generator), torch.randn(64, 128, generator=generator).bfloat16()
    torch.manual_seed(0)
    y = narrow(x.bfloat16())
    y.backward(dy)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        got = wide(x)
        got.backward(dy)
    assert torch.equal(got, y)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.float())
