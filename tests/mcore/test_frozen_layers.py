"""Frozen weights: amaxes are recorded once a microbatch in training all the same, and no GEMM runs for nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec import convert, get_recipe
from megatron_lowprec.linear.linear_gemms import LinearGemms
from tests.mcore.spec_loop import LAYERS, RECOMPUTE, Loop, tracked
from tests.mcore.test_grouped_mlp import bound, experts_of, pass_through

pytestmark = pytest.mark.usefixtures("world", "bounded")

LINEARS = 4  # of a transformer layer


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each GEMM of a backward pass ran."""
    found: Counter[str] = Counter()
    for name in ("dgrad", "wgrad"):
        compute = getattr(LinearGemms, name)

        def counted(self: Any, *args: Any, name: str = name, compute: Any = compute, **options: Any) -> Any:
            found[name] += 1
            return compute(self, *args, **options)

        monkeypatch.setattr(LinearGemms, name, counted)
    return found


def frozen(model: Any, *names: str) -> Loop:
    """A loop on a model with these parts frozen, whose weights do not move."""
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    loop = Loop(model)
    loop.optimizer = torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=0.0)
    return loop


def amaxes(loop: Loop) -> dict[str, torch.Tensor]:
    return {
        f"{number} {name} {operand}": history
        for number, layer in enumerate(loop.model.decoder.layers)
        for name, linear in layer.named_modules()
        if "linear" in name.rpartition(".")[2]
        for operand, history in (linear.get_extra_state() or {}).items()
    }


TRUNK = ("embedding", "decoder.layers.0")  # its input needs no gradient, so Megatron-core would recompute nothing
ABOVE, ONE, ALL = ("decoder.layers.1",), ("decoder.layers.0.mlp.linear_fc1",), ("decoder",)


@pytest.mark.parametrize(
    ("names", "options"), [(TRUNK, {}), (ABOVE, {}), (ONE, {}), (ALL, {}), (ABOVE, RECOMPUTE), (ALL, RECOMPUTE)]
)
def test_the_amaxes_of_inputs_and_weights_are_those_of_trained_layers(
    names: tuple[str, ...], options: dict[str, Any]
) -> None:
    want, got = (frozen(tracked("fp8_delayed", **options), *parts) for parts in ((), names))
    for loop in (want, got):
        loop.run()
        loop.run()
    assert got.losses == want.losses
    assert len(got.losses) == 4
    expected, found = amaxes(want), amaxes(got)
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name][0] > 0 or name.endswith("grad_output"), name
        if not name.endswith("grad_output"):
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp4_rht_sr"])
def test_an_evaluation_with_gradients_records_nothing(recipe: str) -> None:
    """Gradients of a model in evaluation, as for saliency, leave pending amaxes and cached weights alone."""
    found = []
    for evaluates in (False, True):
        loop = Loop(tracked(recipe))
        for _ in range(2):
            loop.run()
            if evaluates:
                loop.model.eval()
                kept = [weight.grad.clone() for weight in loop.model.parameters()]
                (100 * loop.loss(1)).backward()
                loop.model.train()
                for weight, grad in zip(loop.model.parameters(), kept, strict=True):
                    weight.grad = grad
        found.append((loop.losses, loop.state()))
    assert found[0][0] == found[1][0]
    assert [name for name, state in found[0][1].items() if not torch.equal(found[1][1][name], state)] == []


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp4_rht_sr"])
def test_gemms_run_only_for_gradients_that_are_needed(recipe: str, ran: Counter[str]) -> None:
    gradients = []
    for names, dgrads, wgrads in (
        ((), LAYERS * LINEARS, LAYERS * LINEARS),
        (("decoder.layers.1",), LAYERS * LINEARS, LINEARS),
        (("embedding", "decoder.layers.0"), LINEARS, LINEARS),
        # linear_qkv of the first layer: behind a norm with trained weights it has a dgrad
        (("embedding", "decoder.layers.0.mlp"), LAYERS * LINEARS, LAYERS * LINEARS - 2),
    ):
        loop = frozen(tracked(recipe), *names)
        ran.clear()
        loop.backward(0)
        assert (ran["dgrad"], ran["wgrad"]) == (dgrads, wgrads), names
        gradients.append({name: weight.grad for name, weight in loop.model.named_parameters()})
    whole, *rest = gradients
    for part in rest:  # the frozen have none, the others' bits are the same
        assert any(grad is None for grad in part.values())
        assert all(grad is None or torch.equal(grad, whole[name]) for name, grad in part.items())


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_run_only_the_gemms_that_are_needed(grouped: bool, ran: Counter[str]) -> None:
    found, counts = [], (5, 0, 131, 32)
    for part in (None, "linear_fc1", "linear_fc2"):
        experts = experts_of(grouped)
        for name, weight in experts.named_parameters():
            weight.requires_grad_(part is None or part not in name)
        bound(experts, get_recipe("mxfp4_rht_sr")).begin_step(0)
        ran.clear()
        found.append(pass_through(experts, torch.Generator().manual_seed(3), counts))
        assert (ran["dgrad"], ran["wgrad"]) == (8, 8 if part is None else 4)
        for name, weight in experts.named_parameters():
            written = not weight.main_grad.isnan().any()
            assert written == weight.requires_grad, name
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "mxfp8"])
def test_plain_layers_run_only_the_gemms_that_are_needed(recipe: str, ran: Counter[str]) -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)), recipe)
    x = torch.randn(8, 64)
    model(x).sum().backward()
    assert (ran["dgrad"], ran["wgrad"]) == (2, 3)
    for layer in model:
        layer.weight.requires_grad_(False)
    ran.clear()
    y = model(x)
    (function, _), *_ = y.grad_fn.next_functions
    assert [tensor is None for tensor in function.saved_tensors[:2]] == [False, True]  # x is for wgrad
    y.sum().backward()  # biases alone are trained
    assert (ran["dgrad"], ran["wgrad"]) == (2, 0)
