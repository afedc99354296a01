"""Compiled layers: one graph, the bits of eager mode, no recompilation, state, and what the generated code contains."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.utils import run_and_get_code
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import KeepBf16, LowPrecLinear, UserError, convert, get_recipe
from megatron_lowprec.kernels.cast_fp8 import reference as cast_reference
from megatron_lowprec.linear import lowprec_linear
from megatron_lowprec.linear.backends import resolved, traced
from megatron_lowprec.linear.backends.hopper_fp8 import dense
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.layer_histories import LayerHistories
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.layer_match import Layer
from tests.linear.conversions import CONVERTIBLE, forms
from tests.linear.layers import NAMES
from tests.linear.tiny_models import Conv1D, build, train
from tests.weekly import also_weekly

pytestmark = pytest.mark.slow


class Pair(nn.Module):
    """Two layers, and nothing between that a compiler could round otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Pairs(nn.Module):
    """``recompute`` is "", "reentrant" or "not reentrant"."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.recompute, self.layers = recompute, nn.ModuleList([Pair(), Pair()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.layers:
            x = checkpoint(pair, x, use_reentrant=self.recompute == "reentrant") if self.recompute else pair(x)
        return x


def whole(name: str) -> Any:
    """The recipe without layers that stay in bf16."""
    return replace(get_recipe(name), keep_bf16=KeepBf16(), rules=())


def converted(name: str, model: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return convert(model().to(dtype), whole(name))


def steps_of(
    model: nn.Module, steps: int, tokens: tuple[int, ...] = (64,), passes: int = 1, evaluates: bool = False
) -> list[torch.Tensor]:
    """Outputs and gradients, then the state; ``tokens`` of the passes in turn. No step after the second compiles."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    generator, found = torch.Generator().manual_seed(1), []
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            optimizer.zero_grad()
            ys = []
            for index in range(passes):
                x = torch.randn(tokens[(step * passes + index) % len(tokens)], 128, generator=generator).to(dtype)
                ys.append((x.requires_grad_(), model(x)))
            for x, y in ys:  # all forward passes come first, as in a pipeline
                y.backward(y.detach())
                found += [y.detach(), x.grad]
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
            optimizer.step()
            if evaluates:
                model.eval()
                with torch.no_grad():
                    found.append(model(x))
                model.train()
    return found + list(model.state_dict().values())


def equal(found: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(found) == len(want) and all(map(torch.equal, found, want))


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


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve native backends on the CPU: casts by their reference, products by torch's scaled GEMM."""
    monkeypatch.setattr(resolved, "arch_of", lambda _: "sm90")
    monkeypatch.setattr(dense, "load", lambda _: cast_reference)
    # other tests of this process would find the native GEMMs of their layers
    monkeypatch.setattr(lowprec_linear, "traced_gemms", lru_cache(lowprec_linear.traced_gemms.__wrapped__))


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


OURS = re.compile(r"= torch\.ops\.megatron_lowprec\.(\w+)")


@pytest.mark.parametrize(
    ("name", "native", "casts", "others"),
    [
        ("fp8_current", True, 4, set()),
        ("mxfp8", False, 6, {"product", "sum_tokens"}),
        ("mxfp4_rht_sr", False, 4, {"begin_pass", "product", "sum_tokens"}),
    ],
)
def test_generated_code(name: str, native: bool, casts: int, others: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code has the casts and the products, and no operator that hides a layer."""
    if native:
        on_hopper(monkeypatch)
    dtype = torch.bfloat16 if native else torch.float32
    want = steps_of(converted(name, One, dtype), 2)
    model = converted(name, One, dtype)
    model.compile(fullgraph=True)
    found, codes = run_and_get_code(steps_of, model, 2)
    ours = OURS.findall("\n".join(codes))
    assert sum("cast" in each for each in ours) == casts
    assert {each for each in ours if "cast" not in each} == others
    if native:  # whose products a CPU sums in another order
        assert len(re.findall(r"\._scaled_mm(\.default)?\(", "\n".join(codes))) == 3
    else:
        assert equal(found, want)
        assert ours.count("product") == 3


def layout(tensors: QuantizedTensor) -> dict[str, Any]:
    found = {name: getattr(tensors, name) for name in tensors.__slots__}
    return {
        name: (each.shape, each.dtype, each.stride()) if isinstance(each, torch.Tensor) else each
        for name, each in found.items()
    }


@pytest.mark.parametrize("launches", [True, False])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise"])
def test_inductor_launches_casts(name: str, launches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a fixed number of tokens and of any number; not where that is turned off."""
    on_hopper(monkeypatch)
    monkeypatch.setattr(traced, "INDUCTOR_LAUNCHES", launches)
    found: list[set[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def recorded(graph: Any, inputs: Any) -> Any:
            targets = (str(each.target).split(".") for each in graph.graph.nodes)
            found.append({names[1] for names in targets if names[0] == "megatron_lowprec"})
            return graph

        return aot_module_simplified(graph, inputs, fw_compiler=recorded)

    model = converted(name, One, torch.bfloat16)
    model.compile(backend=backend, fullgraph=True)
    steps_of(model, 2, (64, 96))
    assert [each for each in found if each] == [{"planned_cast" if launches else "cast"}] * len(found)
    assert len(found) >= 2


@pytest.mark.parametrize("native", [False, True])
def test_sizes_are_those_of_the_cast(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is told shape, dtype and strides of what a cast returns."""
    if native:
        on_hopper(monkeypatch)
    for name in ("fp8_current", "fp8_rowwise", "fp8_blockwise") if native else NAMES:
        recipe = get_recipe(name).at(Layer(4, "up", 8))
        backend = LinearGemms(recipe, LinearId(1, "x"), 0, AmaxHistory).backends.built(
            "hopper_fp8" if native else "emulated"
        )
        for tensor, shape in (("input", (200, 256)), ("weight", (384, 256)), ("grad_output", (200, 384))):
            for rowwise in (True, False):
                request = CastRequest(rowwise, not rowwise, update_amax=False)
                matrix = torch.randn(shape).bfloat16()
                made = backend.empty(tensor, matrix, request)
                if made is not None:
                    cast = backend.quantize(tensor, matrix, RngStep(0, 0), request)[0]
                    assert layout(made) == layout(cast), (name, tensor, rowwise)


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


PLANNED = ("fp8_current", "fp8_rowwise")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "launches", "tokens"),
    [
        *((name, False, (256,) * 3) for name in (*PLANNED, "fp8_blockwise", "fp8_delayed", "mxfp8", "mxfp4_rht_sr")),
        *((name, True, tokens) for name in PLANNED for tokens in ((256,) * 3, (256, 200, 97))),
    ],
)
def test_compiled_layers_on_a_gpu(
    name: str, launches: bool, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes, scales and gradients of eager mode; the generated code has casts and products, and hides no layer."""
    monkeypatch.setattr(traced, "INDUCTOR_LAUNCHES", launches)
    found: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), Conv1D(128, 128))
        convert(model.to("cuda", torch.bfloat16), whole(name), skip_slower=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def run(model: nn.Module = model, optimizer: Any = optimizer) -> list[torch.Tensor]:
            tensors = []
            for step, count in enumerate(tokens):
                x = torch.randn(count, 128, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
                optimizer.zero_grad()
                y = model(x.requires_grad_())
                y.backward(y.detach())
                tensors += [y.detach(), x.grad, *(each.grad.clone() for each in model.parameters())]
                optimizer.step()
            return tensors

        if compiles:
            model.compile(fullgraph=True)
            tensors, codes = run_and_get_code(run)
            ours = set(OURS.findall("\n".join(codes)))
            assert "linear" not in ours
            if launches:
                assert not ours & {"cast", "cast_with_state", "planned_cast"}
                assert "_planned_cast_kernel" in "\n".join(codes)
            else:
                assert ours & {"cast", "cast_with_state"}
            found.append(tensors)
        else:
            found.append(run())
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", "mxfp4_rht_sr", "fp8_delayed"])
def test_reduced_overhead_on_a_gpu(name: str, launches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mode="reduce-overhead"`` replays CUDA graphs with the state of each step: bits of eager mode."""
    monkeypatch.setattr(traced, "INDUCTOR_LAUNCHES", launches)
    found: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 128, bias=False))
        convert(model.to("cuda", torch.bfloat16), whole(name), skip_slower=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if compiles:
            model.compile(mode="reduce-overhead", fullgraph=True)
        tensors = []
        for step in range(6):  # two run before a graph is recorded
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(256, 128, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
            y = model(x.requires_grad_())
            y.backward(y.detach())
            tensors += [y.detach().clone(), x.grad.clone(), *(each.grad.clone() for each in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        found.append(tensors)
    assert all(map(torch.equal, *found))
