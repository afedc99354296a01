"""Compiled layers: one graph, the bits of eager mode, no recompilation, and state."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.torch_version import TorchVersion

from megatron_lowprec import LowPrecLinear, UserError, convert
from megatron_lowprec.linear.layer_histories import LayerHistories
from tests.linear.compiled_layers import One, Pair, Pairs, converted, equal, on_hopper, steps_of
from tests.linear.conversions import CONVERTIBLE, forms
from tests.linear.tiny_models import build, train
from tests.weekly import also_weekly

pytestmark = pytest.mark.slow
KINDS = ["bf16", "fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp8_2d", "mxfp4_rht_sr"]


@pytest.mark.parametrize("name", also_weekly(CONVERTIBLE, [*KINDS, "nvfp4_all", "quartet2"]))
def test_bits_of_eager_mode(name: str) -> None:
    """20 steps with different numbers of tokens, in two graphs: of the first number, and of any."""
    tokens = (64, 96, 128)
    want = steps_of(converted(name, Pair), 20, tokens)
    model, backend = converted(name, Pair), CompileCounterWithBackend("aot_eager")
    model.compile(backend=backend, fullgraph=True)
    assert equal(steps_of(model, 20, tokens), want)
    assert backend.frame_count == 2


CASES: dict[str, dict[str, Any]] = {
    "pass without tokens": {"tokens": (64, 0), "passes": 2},
    "reentrant checkpoint": {"recompute": "reentrant"},
    "checkpoint": {"recompute": "not reentrant"},
    "reentrant checkpoint of compiled parts": {"recompute": "reentrant", "parts": True},
    "checkpoint of compiled parts": {"recompute": "not reentrant", "parts": True},
    "two passes in flight": {"passes": 2},
    "frozen layer": {"frozen": True},
    "evaluation between steps": {"evaluates": True},
}


def each_case() -> list[Any]:
    """Checkpoints with draws, all others with amax histories; the rest weekly."""
    pairs = [(name, case) for name in ("fp8_delayed", "mxfp4_rht_sr") for case in CASES]
    return also_weekly(pairs, ["-".join(pair) for pair in pairs if ("mxfp4" in pair[0]) == ("checkpoint" in pair[1])])


@pytest.mark.parametrize(("name", "case"), each_case())
def test_state_in_a_graph(name: str, case: str) -> None:
    """Draws and amaxes are those of eager mode, however passes are repeated, or left out."""
    options = {"recompute": "", "parts": False, "frozen": False, **CASES[case]}
    recompute, parts, frozen = (options.pop(key) for key in ("recompute", "parts", "frozen"))
    found = []
    for compiles in (False, True):
        model = converted(name, lambda: Pairs(recompute))
        model.layers[0].requires_grad_(not frozen)
        for module in () if not compiles else model.layers if parts else (model,):
            module.compile(backend="aot_eager", fullgraph=True)
        found.append(steps_of(model, 3, **options))
    assert equal(found[1], found[0])


def test_amaxes_follow_a_weight_that_a_wrapper_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP2 does, which replaces the parameter: before the pass reads them."""
    layer, seen = LowPrecLinear(32, 32, recipe="fp8_delayed"), []
    monkeypatch.setattr(LayerHistories, "to", lambda _, device: seen.append(device))
    monkeypatch.setattr(LayerHistories, "begin_pass", lambda *_: seen.append("pass"))
    torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.randn(32, 32))
    assert seen == [torch.device("cpu"), "pass"]


@pytest.mark.parametrize(
    ("name", "version", "grad", "said"),
    [
        ("fp8_delayed", "2.11.0+cu130", True, True),
        ("fp8_delayed", "2.11.0+cu130", False, False),
        ("fp8_delayed", "2.13.0", True, False),
        ("mxfp8", "2.11.0+cu130", True, False),
    ],
)
def test_repeated_captures_are_said(
    name: str, version: str, grad: bool, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a backward pass, by a torch that takes addresses of saved codes as fixed."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    layer = converted(name, One)
    layer.compile(backend="aot_eager", fullgraph=True)
    with torch._inductor.config.patch("triton.cudagraphs", True), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with torch.set_grad_enabled(grad):
            layer(torch.randn(64, 128))
    assert any("captures a backward pass again" in str(each.message) for each in found) == said


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed"])
def test_a_native_layer_is_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes, scales and products are eager mode's, in two graphs for any number of tokens."""
    on_hopper(monkeypatch)
    tokens = (64, 96, 128)
    want = steps_of(converted(name, Pair, torch.bfloat16), 3, tokens)
    model, backend = converted(name, Pair, torch.bfloat16), CompileCounterWithBackend("aot_eager")
    model.compile(backend=backend, fullgraph=True)
    assert equal(steps_of(model, 3, tokens), want)
    assert backend.frame_count == 2


@forms
@pytest.mark.parametrize("name", ["fp8_current", "mxfp4_rht_sr"])
def test_a_compiled_model(name: str, block: type[nn.Module]) -> None:
    """One graph; the compiler rounds norms and activations otherwise, in the last bits of fp32."""
    torch._dynamo.reset()
    model = convert(build(block), name)
    model.compile(backend="aot_eager", fullgraph=True)
    assert train(model, 3) == pytest.approx(train(convert(build(block), name), 3), rel=1e-4)


@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4_rht_sr"])
def test_blocks_compiled_one_by_one_share_their_graph(name: str) -> None:
    """Layers of one recipe and size have one, with their own draws and amaxes."""
    torch._dynamo.reset()
    model = convert(build(blocks=4), name)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        assert train(model, 2) == pytest.approx(train(convert(build(blocks=4), name), 2), rel=1e-4)


def test_an_opaque_layer(generator: torch.Generator) -> None:
    """One operator; gradients only of what needs one, none in evaluation. A layer with state is refused."""
    w = torch.randn(64, 32, generator=generator)
    for need in range(8):
        torch._dynamo.reset()
        found = []
        for opaque in (False, True):
            x = torch.randn(32, 32, generator=torch.Generator().manual_seed(need)).requires_grad_(bool(need & 1))
            layer = LowPrecLinear(32, 64, recipe="mxfp8")
            layer.weight, layer.bias = (
                nn.Parameter(tensor.clone(), bool(need & flag)) for tensor, flag in ((w, 2), (torch.zeros(64), 4))
            )
            if opaque:
                layer.opaque = True
                layer.compile(backend="aot_eager", fullgraph=True)
            y = layer(x)
            if need:
                y.sum().backward()
            found.append([y.detach(), *(each.grad for each in (x, layer.weight, layer.bias))])
        for got, want in zip(*found, strict=True):
            assert (got is None) == (want is None)
            assert got is None or torch.equal(got, want)
    with pytest.raises(UserError, match="opaque was asked of linear under recipe fp8_delayed, which has random draws"):
        LowPrecLinear(128, 128, recipe="fp8_delayed").opaque = True
