"""Converted models under torch's recomputation, autocast and compiler."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lowprec import KeepBf16, LowPrecLinear, convert, get_recipe
from megatron_lowprec.linear.compiled import REASON
from tests.linear.conversions import CONVERTIBLE, EACH_TIME, PURE, forms, gradients
from tests.linear.tiny_models import Conv1D, build, train
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


def of_layers(name: str, generator: torch.Generator, **options: Any) -> list[torch.Tensor]:
    """Output and gradients of two steps of layers with nothing between that a compiler could round otherwise."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128, bias=False)), name)
    if options:
        model.compile(**options)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(64, 128, generator=generator, requires_grad=True)
        y = model(x)
        y.backward(y.detach())
        found += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PURE if not get_recipe(name).keep_bf16.first_layers])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_graph_break(name: str, backend: str) -> None:
    """The same bits, and one graph."""
    want = of_layers(name, torch.Generator().manual_seed(1))
    got = of_layers(name, torch.Generator().manual_seed(1), backend=backend, fullgraph=True)
    assert all(map(torch.equal, got, want))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr"])
def test_compiled_with_a_break_at_layers_with_state(name: str) -> None:
    """The same bits; each layer is called between two graphs."""
    want = of_layers(name, torch.Generator().manual_seed(1))
    for backend in ("aot_eager", "inductor"):
        assert all(map(torch.equal, of_layers(name, torch.Generator().manual_seed(1), backend=backend), want))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REASON):
        of_layers(name, torch.Generator(), backend="aot_eager", fullgraph=True)


@forms
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_current", "mxfp8"])
def test_a_compiled_model(name: str, block: type[nn.Module]) -> None:
    """One graph; the compiler rounds norms and activations otherwise, in the last bits of fp32."""
    torch._dynamo.reset()
    model = convert(build(block), name)
    model.compile(backend="aot_eager", fullgraph=True)
    assert train(model, 3) == pytest.approx(train(convert(build(block), name), 3), rel=1e-4)


@pytest.mark.slow
def test_blocks_compiled_one_by_one_share_their_graph() -> None:
    """Equal layers of one recipe have one key: no recompilation for each block."""
    torch._dynamo.reset()
    model = convert(build(blocks=4), "fp8_current")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        train(model, 2)


def test_frozen_layers_in_the_compiled_operator(generator: torch.Generator) -> None:
    """Gradients only of what needs one; none in evaluation."""
    from megatron_lowprec.linear.compiled import opaque_linear, operator_key

    key, w = operator_key(get_recipe("mxfp8")), torch.randn(64, 32, generator=generator)
    for need in range(8):
        x = torch.randn(32, 32, generator=generator).requires_grad_(bool(need & 1))
        weight, bias = w.clone().requires_grad_(bool(need & 2)), torch.zeros(64).requires_grad_(bool(need & 4))
        layer = LowPrecLinear(32, 64, recipe="mxfp8")
        layer.weight, layer.bias = (nn.Parameter(t.detach(), t.requires_grad) for t in (weight, bias))
        other = x.detach().clone().requires_grad_(x.requires_grad)
        y, want = opaque_linear(x, weight, bias, key), layer(other)
        assert torch.equal(y, want)
        if need:
            y.sum().backward()
            want.sum().backward()
        for got, grad in ((x, other.grad), (weight, layer.weight.grad), (bias, layer.bias.grad)):
            assert (got.grad is None) == (grad is None)
            assert grad is None or torch.equal(got.grad, grad)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", "fp8_blockwise", "mxfp8"])
def test_compiled_layers_on_a_gpu(name: str) -> None:
    """Native where the device has the GEMM; the compiled operator quantizes x again for wgrad, with the same bits."""
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), Conv1D(128, 128))
        convert(model.to("cuda", torch.bfloat16), name, skip_slower=False)
        if compiles:
            model.compile(fullgraph=True)
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
        y = model(x.requires_grad_())
        y.backward(y.detach())
        found.append([y, x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))
