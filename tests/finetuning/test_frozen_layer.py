"""Frozen weights as codes: bits of the layer that they replace, bytes, state dicts, and what is refused."""

import copy
import pickle
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_lowprec import GemmSpec, QuantSpec, Recipe, UserError, convert, get_recipe
from megatron_lowprec.finetuning import FrozenLayer, dequantize_frozen_weights, quantize_frozen_weights
from megatron_lowprec.kernels.cast_fp8 import reference as cast_fp8
from megatron_lowprec.linear.backends.hopper_fp8.dense import rule_of
from megatron_lowprec.linear.backends.protocol import GemmBackend
from megatron_lowprec.linear.convert import plain_state_dict
from megatron_lowprec.linear.fp8_all_gather import enable_fp8_all_gather
from megatron_lowprec.linear.lowprec_linear import LowPrecConv1D, LowPrecLayer, LowPrecLinear, end_step
from megatron_lowprec.quantization.frozen_weight import Codes, FrozenWeight, stored_specs
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.recipe.registry import MXFP4, NVFP4
from tests.environment import ROOT
from tests.linear.conversions import CONVERTIBLE
from tests.linear.test_blackwell_mx import pretended
from tests.linear.tiny_models import Conv1D, build, tokens_of
from tests.linear.wrapping import train
from tests.weekly import also_weekly

T, IN, OUT = 40, 256, 384
ENTRIES = IN * OUT
# recipe -> sets of codes in bytes an entry, and bytes of scales and amaxes of a weight [O, I]
STORED: dict[str, tuple[float, Callable[[int, int], int]]] = {
    "fp8_delayed": (1.0, lambda o, i: 4 + 4),
    "fp8_current": (1.0, lambda o, i: 4),
    "fp8_rowwise": (2.0, lambda o, i: 4 * (o + i)),
    "fp8_rowwise_gw_hp": (2.0, lambda o, i: 4 * o + 4),
    "fp8_blockwise": (1.0, lambda o, i: 4 * o * i // 128**2),
    "mxfp8": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_ocp": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_e5m2_grad": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_e5m2_weight": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_e5m2_act": (2.0, lambda o, i: 2 * o * i // 32),
    "mxfp8_2d": (1.0, lambda o, i: o * i // 32**2),
    "nvfp4": (0.5, lambda o, i: o * i // 16**2 + 4),
    "nvfp4_all": (0.5, lambda o, i: o * i // 16**2 + 4),
    "nvfp4_four_over_six": (1.0, lambda o, i: 2 * (o * i // 16**2 + 4)),
    "quartet2": (0.5, lambda o, i: o * i // 16 + 4),
}
_RARELY = {"mxfp8_ocp", "mxfp8_e5m2_grad", "mxfp8_e5m2_weight", "mxfp8_e5m2_act", "nvfp4", "nvfp4_four_over_six"}
each_recipe = pytest.mark.parametrize("name", also_weekly(STORED, STORED.keys() - _RARELY))
# kept in bf16 here, or with a reason in the table of the guide
_NOT_HELD = {"bf16": "fprop", "fp8_mxfp4_rht_sr": "dgrad"} | dict.fromkeys(
    ("mxfp4", "mxfp4_rht", "mxfp4_sr", "mxfp4_rht_sr"), "fprop"
)


def stored_bytes(name: str, out_features: int, in_features: int) -> int:
    codes, scales = STORED[name]
    return int(codes * out_features * in_features) + scales(out_features, in_features)


def layer_of(recipe: str | Recipe, kind: str = "linear", dtype: torch.dtype = torch.bfloat16) -> LowPrecLayer:
    """A converted layer with a frozen weight."""
    torch.manual_seed(0)
    plain = nn.Linear(IN, OUT) if kind == "linear" else Conv1D(OUT, IN)
    plain.weight.requires_grad_(False)
    layer = convert(nn.Sequential(plain.to(dtype)), _all_blocks(recipe))[0]
    assert isinstance(layer, LowPrecLayer)
    return layer


def _all_blocks(recipe: str | Recipe) -> Recipe:
    """Without the rule that keeps the last blocks in bf16."""
    return replace(get_recipe(recipe) if isinstance(recipe, str) else recipe, rules=())


def held(recipe: str | Recipe, kind: str = "linear", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return quantize_frozen_weights(layer_of(recipe, kind, dtype), **options)


def passes(layer: LowPrecLayer, number: int = 2) -> list[list[torch.Tensor]]:
    """y, dx and db of passes, each of them a step."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(number):
        x, dy = (
            torch.randn(T, width, generator=generator).to(layer.weight.device, layer.weight.dtype)
            for width in (IN, OUT)
        )
        y = layer(x.requires_grad_())
        layer.bias.grad = None  # type: ignore[union-attr]
        y.backward(dy)
        found.append([y.detach(), x.grad, layer.bias.grad])  # type: ignore[union-attr,list-item]
        end_step(layer)
    return found


def equal(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, other in zip(got, want, strict=True) for a, b in zip(one, other, strict=True))


# ---- bits
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@each_recipe
def test_passes_have_the_bits_of_the_weight(name: str, kind: str) -> None:
    """y, dx and db; under delayed scaling from the second step on, since the scale of the first is 1."""
    first = name == "fp8_delayed"
    want, layer = passes(layer_of(name, kind)), held(name, kind)
    assert isinstance(layer, FrozenLayer)
    assert isinstance(layer, LowPrecLinear if kind == "linear" else LowPrecConv1D)
    got = passes(layer)
    assert equal(got[first:], want[first:])
    assert not equal(got[1:], passes(layer_of("bf16", kind))[1:])


@pytest.mark.gpu
@each_recipe
def test_passes_on_a_gpu_have_the_bits_of_the_weight(name: str) -> None:
    """Native operands of FP8 recipes and Triton's casts of the others; codes are those of a CPU."""
    first = name == "fp8_delayed"
    want = passes(layer_of(name).cuda())
    layer, on_cpu = quantize_frozen_weights(layer_of(name).cuda()), held(name)
    assert equal(passes(layer)[first:], want[first:])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(layer.buffers(), on_cpu.buffers(), strict=True))


@pytest.mark.parametrize("name", also_weekly(["mxfp8", "mxfp8_2d", "nvfp4_all", "quartet2"], ["nvfp4_all"]))
def test_block_scaled_units_read_the_codes(name: str) -> None:
    """Codes and scales in the units' layout, by the model of the units that runs on a CPU."""
    with pretended():
        layer = held(name)
        assert equal(passes(layer), passes(layer_of(name)))
        gemms = layer.linear_gemms.backends.resolved.gemms
        assert {gemms[gemm].name for gemm in ("fprop", "dgrad")} == {"blackwell_mx"}


def test_every_recipe_is_held_or_refused() -> None:
    ends = {"fp8_current_bf16_ends"}  # the GEMMs of fp8_current
    assert set(STORED) | set(_NOT_HELD) | ends == set(CONVERTIBLE)
    for name, gemm in _NOT_HELD.items():
        why = f"cannot hold its frozen weight as codes: {gemm} takes the weight"
        if name == "bf16":
            why = r"recipe bf16 quantizes no weight: pass storage=QuantSpec\("
        with pytest.raises(UserError, match=why):
            held(name)


@pytest.mark.parametrize("of_fprop", [False, True])
def test_dgrad_of_fprop_s_codes_needs_one_direction(of_fprop: bool) -> None:
    """MXFP8 by rows: with ``source="fprop"`` dgrad quantizes the dequantized codes again, with and without codes."""
    mxfp8 = get_recipe("mxfp8")
    assert mxfp8.dgrad.weight is not None
    weight = replace(mxfp8.dgrad.weight, source="fprop" if of_fprop else "original")
    recipe = replace(mxfp8, dgrad=replace(mxfp8.dgrad, weight=weight))
    layer = held(recipe)
    assert equal(passes(layer), passes(layer_of(recipe)))
    assert sum(b.nbytes for b in layer.buffers()) == (ENTRIES + ENTRIES // 32) * (1 if of_fprop else 2)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4_rht_sr", "quartet2", "fp8_delayed"])
@pytest.mark.parametrize("storage", [MXFP4, NVFP4], ids=lambda spec: spec.granularity)
def test_stored_values_replace_the_weight(recipe: str, storage: QuantSpec) -> None:
    """With ``storage`` a layer has the bits of one whose weight has the values of the codes, under every recipe."""
    layer, rounded = held(recipe, storage=storage), layer_of(recipe)
    values = quantize(rounded.weight, storage).dequantize().bfloat16()
    rounded.weight.data.copy_(values)
    assert torch.equal(layer.weight.value(), values)
    assert equal(passes(layer), passes(rounded))
    scales = ENTRIES // 32 if storage is MXFP4 else ENTRIES // 16 + 4
    assert sum(buffer.nbytes for buffer in layer.buffers()) == ENTRIES // 2 + scales


@pytest.mark.parametrize("granularity", ["tensor", "row", "128x128"])
def test_operands_of_native_gemms_are_the_cast_s(granularity: str) -> None:
    spec = QuantSpec("e4m3", granularity=granularity)
    weight = layer_of("bf16").weight
    specs = stored_specs(Recipe("r", "", fprop=GemmSpec(spec, spec), dgrad=GemmSpec(None, spec, spec)))
    codes = [Codes.of(matrix, one) for matrix, one in zip((weight, weight.t()), specs[:2]) if one is not None]
    stored = [tensor for each in codes for tensor in each if tensor is not None]
    frozen = FrozenWeight(specs, stored, (OUT, IN), torch.bfloat16)
    want = cast_fp8.cast_fp8(weight, rule_of(spec), rowwise=True, columnwise=True)
    for columnwise in (False, True):
        found = frozen.quantized(columnwise=columnwise, codes=True)
        assert found is not None
        got = found.columnwise() if columnwise else found.rowwise()
        for a, b in zip(got, want[2:4] if columnwise else want[:2], strict=True):
            assert a is not None
            assert b is not None
            assert (a.dtype, a.is_contiguous()) == (b.dtype, True)
            assert torch.equal(a.float(), b.float())


# ---- work and memory
@each_recipe
def test_bytes_are_those_of_codes_and_scales(name: str) -> None:
    layer = held(name)
    found = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    assert found == stored_bytes(name, OUT, IN) + layer.bias.nbytes


def test_a_frozen_layer_quantizes_nothing_for_wgrad_and_no_weight() -> None:
    """One cast of x by rows, one of dy by rows: neither direction of wgrad, and the codes are read."""

    class Counted(GemmBackend):
        def __init__(self, backend: GemmBackend) -> None:
            self.backend, self.name = backend, backend.name

        def __getattribute__(self, name: str) -> Any:
            own = ("backend", "quantize", "name", "__class__")
            return object.__getattribute__(self, name) if name in own else getattr(self.backend, name)

        def quantize(self, tensor: str, *args: Any, **options: Any) -> Any:
            casts.update([(tensor, *args[2][:2])])
            return self.backend.quantize(tensor, *args, **options)

    Counted.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    casts: Counter[Any] = Counter()
    layer = held("mxfp8")
    passes(layer, 1)
    with layer.linear_gemms.backends.wrapped(Counted):
        passes(layer, 1)
    assert casts == {("input", True, False): 1, ("grad_output", True, False): 1}


# ---- in a model
def losses_of(codes: bool, recipe: str, way: str) -> list[float]:
    """Losses of steps of a model whose embedding, last block and norms train; ``way`` of ``_WAYS``."""
    model = build(recompute=way if "reentrant" in way else "").bfloat16()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path.startswith(("embed", "layers.1")) or "norm" in path)
    convert(model, recipe)
    if codes:
        quantize_frozen_weights(model)
    assert sum(isinstance(module, FrozenLayer) for module in model.modules()) == (7 if codes else 0)
    run: nn.Module = model
    if way == "FSDP2":
        mesh = init_device_mesh("cpu", (1,))
        run = fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    elif way == "DDP":
        run = DistributedDataParallel(model, broadcast_buffers=False)
    elif way == "compiled":
        run = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(2):
        for microbatch in range(2 if way == "accumulated" else 1):
            loss = run(tokens_of(2 * step + microbatch))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if way == "evaluated":
            with torch.no_grad():
                losses.append(run.eval()(tokens_of(9)).item())
            run.train()
    return losses


in_bf16 = cache(partial(losses_of, False))
_WAYS = ("accumulated", "evaluated", "reentrant", "not reentrant", "compiled", "FSDP2", "DDP")


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.parametrize("way", also_weekly(_WAYS, set(_WAYS) - {"compiled", "not reentrant"}))
@pytest.mark.parametrize("recipe", also_weekly(["fp8_current", "nvfp4_all"], ["fp8_current"]))
def test_models_have_the_losses_of_weights_in_bf16(recipe: str, way: str) -> None:
    """Bit for bit, trained and frozen layers together; FSDP2 and DDP over one rank, which wraps all the same."""
    if way in ("FSDP2", "DDP"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert losses_of(True, recipe, way) == in_bf16(recipe, way if way in ("accumulated", "evaluated") else "alone")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_an_fp8_all_gather_leaves_codes_on_each_rank() -> None:
    """FSDP2 gathers the trained layer as codes, with the losses of a gather in bf16."""

    def sharded(gathers: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN)).bfloat16()
        model[0].requires_grad_(False)
        model = quantize_frozen_weights(convert(model, "fp8_current"))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        if gathers:
            for given in ("bf16", torch.float16):
                with pytest.raises(UserError, match=rf"was given param_dtype={given!r}, but recipes compute in"):
                    enable_fp8_all_gather(model, given)  # type: ignore[arg-type]
            enable_fp8_all_gather(model)
            with pytest.raises(UserError, match="was called for this model before: call it once"):
                enable_fp8_all_gather(model)
        assert [layer.gathers_fp8 for layer in model] == [False, gathers]
        return model

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(T, IN, generator=generator).bfloat16() for _ in range(2)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert train(sharded(True), batches) == train(sharded(False), batches)
        frozen = nn.Sequential(held("fp8_current"))
        with pytest.raises(UserError, match="can send no weight as codes under recipe fp8_current: held as codes"):
            enable_fp8_all_gather(fully_shard(frozen, mesh=init_device_mesh("cpu", (1,))))
    finally:
        dist.destroy_process_group()


# ---- state dicts, copies and moves
@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp8", "nvfp4_all"])
def test_state_dicts_of_codes_and_of_weights_load(name: str, tmp_path: Path) -> None:
    layer, other = held(name), held(name)
    unquantized = layer_of(name)
    with torch.no_grad():
        unquantized.weight.mul_(3)
    other.load_state_dict(unquantized.state_dict())  # the weight of a checkpoint in bf16
    again = quantize_frozen_weights(unquantized)
    assert equal(passes(other), passes(again))
    save_file(other.state_dict(), tmp_path / "codes.safetensors")
    layer.load_state_dict(load_file(tmp_path / "codes.safetensors"), strict=True)
    assert equal(passes(layer), passes(other))


@pytest.mark.parametrize("assign", [False, True])
def test_a_weight_of_another_shape_is_reported_as_the_weight(assign: bool) -> None:
    """As torch reports it: no name or size of codes, and what the layer holds stays."""
    layer, state = held("mxfp8", "conv1d"), layer_of("mxfp8", "conv1d").state_dict()
    want = passes(layer)
    state["weight"] = state["weight"].t()
    with pytest.raises(RuntimeError) as error:
        layer.load_state_dict(state, assign=assign)
    (line,) = str(error.value).splitlines()[1:]
    assert line.strip() == (
        f"size mismatch for weight: copying a param with shape torch.Size([{OUT}, {IN}]) from checkpoint, the shape "
        f"in current model is torch.Size([{IN}, {OUT}])."
    )
    assert equal(passes(layer), want)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_copies_pickles_and_moves_keep_the_bits(kind: str) -> None:
    want = passes(held("fp8_rowwise", kind))
    layer = held("fp8_rowwise", kind)
    copies = [copy.deepcopy(layer)]
    if kind == "linear":  # the Conv1D of these tests is a stand-in that does not pickle
        copies.append(pickle.loads(pickle.dumps(layer)))
    for one in copies:
        assert isinstance(one, FrozenLayer)
        assert equal(passes(one), want)
    layer.float().bfloat16()  # would round fp32 scales
    assert layer.weight.dtype == torch.bfloat16
    assert equal(passes(layer), want)
    empty = copy.deepcopy(layer).to("meta")
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert equal(passes(empty), want)


def test_autocast_takes_codes_of_its_dtype() -> None:
    """An fp32 weight under autocast to bf16: the codes are those of the weight rounded to bf16."""
    x = torch.randn(T, IN)
    layer, frozen = layer_of("fp8_current", dtype=torch.float32), held("fp8_current", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UserError, match=r"call quantize_frozen_weights\(model, dtype=torch.bfloat16\)"):
            frozen(x)
        frozen = quantize_frozen_weights(layer_of("fp8_current", dtype=torch.float32), dtype=torch.bfloat16)
        assert torch.equal(frozen(x), layer(x))


@pytest.mark.parametrize(
    ("name", "kind"), also_weekly([("fp8_current", "linear"), ("mxfp8", "conv1d")], ["fp8_current-linear"])
)
def test_a_compiled_layer_is_one_operator_with_eager_bits(name: str, kind: str) -> None:
    """No graph break, whatever the number of tokens; the graph reads codes and scales, no weight."""
    layer = held(name, kind)
    want = passes(layer)
    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, example_inputs)

    compiled = torch.compile(nn.Sequential(layer, nn.Identity()), fullgraph=True, backend=backend)
    compiled.weight, compiled.bias = layer.weight, layer.bias  # as ``passes`` reads them
    assert equal(passes(compiled), want)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if "lowprec" in target] == ["megatron_lowprec.linear.default"]
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(T, IN)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("name", also_weekly(["fp8_delayed", "nvfp4_all"], ["nvfp4_all"]))
def test_state_of_a_recipe_breaks_the_graph(name: str) -> None:
    """Delayed scales and draws: the layer runs between two graphs, with eager bits."""
    model, layer = nn.Sequential(held(name), nn.GELU()), held(name)
    x = torch.randn(T, IN, dtype=torch.bfloat16)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, backend="eager")(x), nn.functional.gelu(layer(x)))


# ---- back to a parameter, and errors
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_dequantized_weights_are_parameters(kind: str) -> None:
    layer = held("mxfp8", kind)
    want, kinds = layer.weight.value(), type(layer_of("mxfp8", kind))
    layer.weight.requires_grad_(False)
    writes = (
        lambda: layer.weight.data.add_(1),
        lambda: layer.weight.add_(1),
        lambda: setattr(layer.weight, "data", torch.zeros(layer.weight.shape)),
        lambda: layer.weight.requires_grad_(True),  # would train nothing
        lambda: setattr(layer.weight, "requires_grad", True),
    )
    for write in writes:
        with pytest.raises(UserError, match=r"call megatron_lowprec\.finetuning\.dequantize_frozen_weights\(model\)"):
            write()
    assert torch.equal(layer.weight + 0, want)  # to read
    dequantize_frozen_weights(layer)
    assert type(layer) is kinds
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, want)
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}
    assert dict(layer.named_buffers()) == {}


def test_weights_that_cannot_be_codes() -> None:
    with pytest.raises(UserError, match="found no converted layer: call convert first"):
        quantize_frozen_weights(nn.Linear(IN, OUT))
    layer = layer_of("fp8_current")
    layer.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"no converted layer with a frozen weight; freeze weights by requires_grad_"):
        quantize_frozen_weights(layer)
    for spec in (replace(MXFP4, rounding="stochastic"), QuantSpec("e4m3", granularity="tensor", scaling="delayed")):
        with pytest.raises(UserError, match="takes a storage spec with current scales"):
            held("bf16", storage=spec)
    with pytest.raises(UserError, match="all codes already: call dequantize_frozen_weights first to change storage"):
        quantize_frozen_weights(held("mxfp8"), storage=MXFP4)
    layer = layer_of("mxfp8")
    for given, why in (
        ({"model": [layer]}, r"a list as model: give a torch\.nn\.Module"),
        ({"storage": "mxfp4"}, r"a str as storage: give a QuantSpec, as in QuantSpec\("),
        ({"dtype": "bf16"}, "dtype='bf16', but recipes compute in bfloat16 or float32"),
        ({"dtype": torch.float16}, r"dtype=torch\.float16, but recipes compute in bfloat16 or float32"),
    ):
        with pytest.raises(UserError, match=why):
            quantize_frozen_weights(**{"model": layer} | given)  # type: ignore[arg-type]


@pytest.mark.parametrize("calls", [0, 1])
def test_a_failure_leaves_the_weight(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example out of memory, in either direction: the layer is the converted one, and a second call holds it."""
    layer, want, of = layer_of("mxfp8"), passes(layer_of("mxfp8")), Codes.of
    left = [of] * calls

    def fails(matrix: torch.Tensor, spec: QuantSpec) -> Codes:
        if not left:
            raise torch.OutOfMemoryError
        return left.pop()(matrix, spec)

    monkeypatch.setattr(Codes, "of", staticmethod(fails))
    with pytest.raises(torch.OutOfMemoryError):
        quantize_frozen_weights(layer)
    monkeypatch.undo()
    assert type(layer) is type(layer_of("mxfp8"))
    assert isinstance(layer.weight, nn.Parameter)
    assert equal(passes(layer), want)
    assert equal(passes(quantize_frozen_weights(layer)), want)


# ---- the guide
def test_the_guide_has_the_bytes_of_every_recipe() -> None:
    """An entry of a weight 4096 x 4096, to three places."""
    page = (ROOT / "docs/guide/lora.md").read_text(encoding="utf-8").split("## Bytes\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    found = {name: row[3].strip() for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert found == {name: f"{stored_bytes(name, 4096, 4096) / 4096**2:.3f}" for name in STORED}
    refused = page.split("**Refused:**")[1].splitlines()[0]
    assert set(re.findall(r"`(\w+)`", refused)) - {"storage"} == set(_NOT_HELD)


def test_codes_of_another_format_are_refused() -> None:
    """They have the same names and sizes."""
    state = held("mxfp8").state_dict()
    held("mxfp8").load_state_dict(state)
    with pytest.raises(UserError, match=r"holds codes of e5m2 by 1x32.*has codes of e4m3 by 1x32"):
        held("mxfp8_e5m2_weight").load_state_dict(state)


def test_replaced_buffers_are_read() -> None:
    layer, x = held("fp8_current"), torch.randn(8, IN).bfloat16()
    y = layer(x)
    zeros = {name: torch.zeros_like(buffer) for name, buffer in layer.named_buffers()}
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(layer, zeros, x), layer.bias.expand(8, -1))
        assert torch.equal(layer(x), y)
        layer.weight_rowwise_scale = 2 * layer.weight_rowwise_scale
        assert not torch.equal(layer(x), y)


def test_codes_that_change_before_the_backward_pass_are_refused() -> None:
    layer, x = held("fp8_current"), torch.randn(8, IN).bfloat16().requires_grad_()
    y = layer(x)
    layer.weight_rowwise_data.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_released_weight_has_its_former_dtype() -> None:
    layer = convert(nn.Sequential(nn.Linear(IN, OUT)), "fp8_current", dtype=torch.bfloat16).requires_grad_(False)
    quantize_frozen_weights(layer, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"dequantize_frozen_weights\(model\) first"):
        plain_state_dict(layer)
    assert dequantize_frozen_weights(layer)[0].weight.dtype == torch.float32
