"""Frozen layers in models that train: wrappers of torch, FP8 all-gathers, autocast and torch.compile."""

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_lowprec import UserError, convert
from megatron_lowprec.finetuning import FrozenLayer, quantize_frozen_weights
from megatron_lowprec.linear.fp8_all_gather import enable_fp8_all_gather
from tests.finetuning.frozen_layers import IN, OUT, T, equal, held, layer_of, passes
from tests.linear.tiny_models import build, tokens_of
from tests.linear.wrapping import train
from tests.weekly import also_weekly


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
