"""Conversion of plain PyTorch models: that nothing else of the model changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megatron_lowprec
from megatron_lowprec import LowPrecLinear, convert
from megatron_lowprec.linear.lowprec_linear import LowPrecConv1D
from tests.linear.conversions import CONVERTIBLE, EACH_TIME, PER_BLOCK, converted, forms
from tests.linear.tiny_models import Conv1D, Gpt2Block, LlamaBlock, build, tokens_of, train
from tests.weekly import also_weekly


@forms
@pytest.mark.parametrize("name", also_weekly(CONVERTIBLE, EACH_TIME))
def test_a_model_trains_under_every_recipe(name: str, block: type[nn.Module]) -> None:
    model = build(block, blocks=3)
    assert convert(model, name) is model
    in_bf16 = {"fp8_current_bf16_ends": 2, "nvfp4": 1, "nvfp4_four_over_six": 1}.get(name, 0)
    assert len(converted(model)) == (3 - in_bf16) * PER_BLOCK[block]
    losses = train(model, 4)
    assert losses[-1] < losses[0]


def test_the_bf16_recipe_changes_no_bit() -> None:
    for block in (LlamaBlock, Gpt2Block):
        assert train(convert(build(block), "bf16"), 3) == pytest.approx(train(build(block), 3), rel=1e-6)
    assert train(convert(build(), "bf16"), 3) == train(build(), 3)


@forms
@pytest.mark.parametrize("name", also_weekly(["fp8_current", "mxfp4_rht_sr"], ["mxfp4_rht_sr"]))
@pytest.mark.slow
def test_fifty_steps(name: str, block: type[nn.Module]) -> None:
    """The loss falls by as much as in bf16, to within a tenth of the fall."""
    start, *_, want = train(build(block), 50)
    *_, got = train(convert(build(block), name), 50)
    assert want < start / 2
    assert abs(got - want) < 0.1 * (start - want)


def test_parameters_hooks_and_modules_are_the_same_objects() -> None:
    model = build()
    calls: list[str] = []
    layer = model.layers[0].q_proj
    handle = layer.register_forward_hook(lambda *_: calls.append("forward"))
    model.layers[1].o_proj.weight.requires_grad_(False)
    model.layers[1].k_proj.weight = model.layers[1].v_proj.weight  # tied
    parameters = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    modules = [id(module) for module in model.modules()]
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    convert(model, "mxfp4_rht_sr")
    assert {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)} == parameters
    assert [id(module) for module in model.modules()] == modules
    assert type(layer) is LowPrecLinear
    before = layer.weight.detach().clone()
    model(tokens_of(1)).backward()
    optimizer.step()
    assert calls == ["forward"]
    assert not torch.equal(layer.weight, before)
    assert model.layers[1].o_proj.weight.grad is None
    handle.remove()
    model(tokens_of(1))
    assert calls == ["forward"]
    assert "recipe=mxfp4_rht_sr" in repr(layer)


def test_a_shared_module_is_converted_once() -> None:
    shared = nn.Linear(64, 64)
    model = convert(nn.Sequential(shared, nn.ReLU(), shared), "mxfp8")
    assert converted(model) == ["0"]
    model(torch.randn(32, 64)).sum().backward()


def test_a_linear_layer_alone() -> None:
    layer = nn.Linear(64, 64)
    assert convert(layer, "mxfp8") is layer
    assert isinstance(layer, LowPrecLinear)


def test_conv1d_is_the_linear_layer_of_the_transposed_weight(generator: torch.Generator) -> None:
    """Operands are equal; the order of fp32 sums may follow the memory layout."""
    for name in ("fp8_current", "mxfp8", "mxfp4_rht_sr"):
        model = nn.Sequential(Conv1D(128, 64))
        linear = nn.Sequential(nn.Linear(64, 128))
        with torch.no_grad():
            linear[0].weight.copy_(model[0].weight.t())
            linear[0].bias.copy_(model[0].bias)
        found = []
        x, dy = torch.randn(2, 32, 64, generator=generator), torch.randn(2, 32, 128, generator=generator)
        for each in (convert(model, name), convert(linear, name)):
            torch.manual_seed(0)
            given = x.clone().requires_grad_()
            y = each(given)
            y.backward(dy)
            weight = each[0].weight.grad
            found.append((y, given.grad, weight if weight.shape == (128, 64) else weight.t(), each[0].bias.grad))
        assert isinstance(model[0], LowPrecConv1D)
        assert "nf=128, nx=64, recipe=" in repr(model)
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_public_name() -> None:
    assert megatron_lowprec.convert is convert
    assert F.linear is torch.nn.functional.linear  # nothing is patched
