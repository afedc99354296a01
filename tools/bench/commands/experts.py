"""The experts of a layer, forward and backward: grouped and one after the other, over Megatron-core's in bf16."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.text_tables import Column, Row
from tools.bench.measure import Bench, distance, errors, one_line
from tools.bench.peers.layers import absent
from tools.bench.report import Report, spread_columns
from tools.bench.shapes import EXPERTS, ExpertShape

RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "mxfp4_rht_sr")
STOCK, TORCH = "Megatron-core, bf16", "torch grouped product, bf16"
TE_RECIPES = ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise")
COLUMNS = (
    *(Column("shape", "shape"), Column("tokens", "tokens", "d"), Column("experts", "experts")),
    *spread_columns(3),
    Column("over_stock", "/Megatron-core", ".3f"),
    Column("host_us", "host us", ".0f"),
    Column("tflops", "TFLOP/s", ".0f"),
)
_MULTIPLE = 16  # tokens of an expert: what FP8 GEMMs of TransformerEngine need; this project's pad within their casts
_NEARLY = 2e-2  # relative distance of two summation orders in bf16, over two layers


@dataclass(frozen=True)
class Inputs:
    """Tokens sorted by expert.

    Attributes:
        x: bf16 [T, hidden], requires a gradient.
        dy: bf16 [T, hidden].
        probs: fp32 [T], the router's probabilities.
        counts: tokens of each expert, a list and an int64 tensor.
    """

    x: torch.Tensor
    dy: torch.Tensor
    probs: torch.Tensor
    counts: list[int]
    counts_tensor: torch.Tensor


Block = Callable[[Inputs], torch.Tensor]
"""Forward and backward pass; the output."""


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Each shape under each recipe, and in peer libraries."""
    rows: list[Row] = []
    with _process_groups(bench.device):
        for name in args.shapes or ("deepseek_16b",):
            shape = EXPERTS[name]
            inputs = _inputs(shape, args.tokens, bench.device, torch.Generator().manual_seed(args.seed))
            rows += _rows(shape, inputs, args, bench, report)
    missing = absent("te", bench.device) if "te" in args.peers else None
    report.note(
        *([f"peer te is missing: {missing}"] if missing else []),
        "ms: forward and backward of fc1, SwiGLU and fc2 of all experts, weight gradients into fp32 main gradients",
        "a step's first microbatch: weights are quantized in each call",
        f"tokens: before routing; each goes to the shape's number of experts, drawn at random from --seed {args.seed}",
        f"an expert's tokens are rounded to multiples of {_MULTIPLE}, which FP8 GEMMs of TransformerEngine need",
        f"{args.rounds} rounds in turn; 'rounds': the largest difference between their medians",
        f"{STOCK} and {TORCH}: bf16 weight gradients, copied to main gradients",
    )
    report.table(f"experts, forward + backward, {args.tokens} tokens: {args.device}", rows, COLUMNS)


def _rows(shape: ExpertShape, inputs: Inputs, args: argparse.Namespace, bench: Bench, report: Report) -> list[Row]:
    named = {"shape": shape.name, "tokens": args.tokens}
    blocks: dict[str, Block] = {}
    first: dict[str, torch.Tensor] = {}
    rows: list[Row] = []
    for name, make in _makes(shape, args, bench.device).items():
        try:
            block = make()
            first[name] = found = block(inputs)
            # Recipes differ by their rounding; the experts of one recipe only by the order of sums. Delayed scales
            # differ from call to call, so first calls are compared.
            one_by_one = first.get(name.removesuffix(", grouped"))  # None if it failed
            error = 0.0 if one_by_one is None else distance(found, one_by_one)
            if not (found.isfinite().all() and error < _NEARLY):
                raise ValueError(f"differs from one expert after the other by {error:.1e}")
            blocks[name] = block
        except errors() as error:
            rows.append({**named, "experts": name, "failed": one_line(error)})
        report.progress(f"{shape.name} {name}: {'ready' if name in blocks else 'failed'}")
    calls = {name: partial(block, inputs) for name, block in blocks.items()}
    timings = bench.compare(calls, args.rounds)
    stock = timings.get(STOCK)
    for name, timing in timings.items():
        row: dict[str, Any] = {
            **named,
            "experts": name,
            **timing.row(),
            "host_us": bench.host_microseconds(calls[name]),
        }
        row["over_stock"] = timing.ms / stock.ms if stock else None
        row["tflops"] = shape.flops(args.tokens) / timing.ms / 1e9
        rows.append(row)
    return rows


def _makes(shape: ExpertShape, args: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], Block]]:
    """Row -> function that builds its experts."""
    makes: dict[str, Callable[[], Block]] = {STOCK: partial(_stock, shape, device)}
    makes[TORCH] = partial(_torch, shape, device)
    for recipe in args.recipes or RECIPES:
        makes[recipe] = partial(_ours, shape, device, recipe, grouped=False)
        makes[f"{recipe}, grouped"] = partial(_ours, shape, device, recipe, grouped=True)
    if "te" in args.peers and absent("te", device) is None:
        makes |= {f"TE GroupedLinear, {recipe}": partial(_te, shape, device, recipe) for recipe in TE_RECIPES}
    return makes


def _inputs(shape: ExpertShape, tokens: int, device: torch.device, generator: torch.Generator) -> Inputs:
    chosen = torch.rand(tokens, shape.experts, generator=generator).topk(shape.topk, dim=1).indices
    counts = torch.bincount(chosen.flatten(), minlength=shape.experts)
    # whole multiples, with the rest in the largest expert
    counts = counts // _MULTIPLE * _MULTIPLE
    total = tokens * shape.topk
    counts[counts.argmax()] += total - counts.sum()
    x, dy = (torch.randn(total, shape.hidden, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    probs = torch.rand(total, generator=generator).to(device)
    return Inputs(x.requires_grad_(), dy, probs, counts.tolist(), counts)


@contextmanager
def _process_groups(device: torch.device) -> Iterator[None]:
    """Megatron-core's, in a world of one process."""
    from megatron_lowprec.mcore import cpu_compat

    cpu_compat.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _mlp(shape: ExpertShape, device: torch.device, linears: Sequence[type], grouped: bool) -> Any:
    """Megatron-core's experts with these linear layers."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_lowprec.mcore.layers.grouped_mlp import LowPrecGroupedMLP

    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=1,
        num_moe_experts=shape.experts,
        moe_ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False,
    )
    # the same weights in each call: on a CPU from torch's generator, on a GPU from Megatron-core's
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    submodules = MLPSubmodules(linear_fc1=linears[0], linear_fc2=linears[1])
    experts = (LowPrecGroupedMLP if grouped else SequentialMLP)(
        shape.experts, config, submodules, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    experts = experts.to(device)
    _give_main_gradients(list(experts.parameters()))
    return experts


def _give_main_gradients(weights: Sequence[Any]) -> None:
    """fp32 main gradients in one buffer, which all rows of a shape share to save memory."""
    buffer = _main_gradients(sum(weight.numel() for weight in weights), weights[0].device)
    for weight, part in zip(weights, buffer.split([weight.numel() for weight in weights]), strict=True):
        weight.main_grad = part.view(weight.shape)


@lru_cache(maxsize=1)
def _main_gradients(entries: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(entries, device=device)


def _ours(shape: ExpertShape, device: torch.device, recipe: str, grouped: bool) -> Block:
    from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear, LowPrecRowParallelLinear
    from megatron_lowprec.mcore.runtime import RecipeRuntime

    experts = _mlp(shape, device, (LowPrecColumnParallelLinear, LowPrecRowParallelLinear), grouped)
    runtime = RecipeRuntime(get_recipe(recipe), device, num_layers=1, seed=1)
    for number, expert in enumerate(experts.local_experts):
        for name in ("linear_fc1", "linear_fc2"):
            runtime.bind_linear(getattr(expert, name), 1, f"mlp.experts.{name}", number)

    def block(inputs: Inputs) -> torch.Tensor:
        runtime.begin_step(0)
        runtime.begin_microbatch(0)
        y = _both_passes(experts, inputs)
        runtime.end_step()
        return y

    return block


def _stock(shape: ExpertShape, device: torch.device) -> Block:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    experts = _mlp(shape, device, (ColumnParallelLinear, RowParallelLinear), grouped=False)
    return lambda inputs: _both_passes(experts, inputs)


def _both_passes(experts: Any, inputs: Inputs) -> torch.Tensor:
    y: torch.Tensor = experts(inputs.x, inputs.counts_tensor, inputs.probs)[0]
    y.backward(inputs.dy)
    inputs.x.grad = None
    _into_main_gradients(list(experts.parameters()))
    return y.detach()


def _into_main_gradients(weights: Sequence[Any]) -> None:
    """Copy gradients that a layer has not written there itself."""
    left = [weight for weight in weights if weight.grad is not None]
    written = [weight for weight in left if not getattr(weight, "grad_added_to_main_grad", False)]
    if written:
        torch._foreach_copy_([w.main_grad for w in written], [w.grad for w in written])
    for weight in left:
        weight.grad = None


def _swiglu(gate_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    out: torch.Tensor = weighted_bias_swiglu_impl(gate_up, None, probs.unsqueeze(-1), False)
    return out


def _weights(shape: ExpertShape, device: torch.device) -> list[Any]:
    """fc1 [E, 2 ffn, hidden] and fc2 [E, hidden, ffn] with their main gradients."""
    generator = torch.Generator().manual_seed(1)
    weights: list[Any] = []
    for size in ((shape.experts, 2 * shape.ffn, shape.hidden), (shape.experts, shape.hidden, shape.ffn)):
        weight = (0.02 * torch.randn(size, generator=generator)).to(device, torch.bfloat16)
        weights.append(torch.nn.Parameter(weight))
    _give_main_gradients(weights)
    return weights


def _torch(shape: ExpertShape, device: torch.device) -> Block:
    fc1, fc2 = _weights(shape, device)

    def block(inputs: Inputs) -> torch.Tensor:
        ends = torch.cumsum(inputs.counts_tensor, 0).to(device, torch.int32)
        y = torch._grouped_mm(inputs.x, fc1.transpose(1, 2), offs=ends)
        y = torch._grouped_mm(_swiglu(y, inputs.probs), fc2.transpose(1, 2), offs=ends)
        y.backward(inputs.dy)
        inputs.x.grad = None
        _into_main_gradients([fc1, fc2])
        return y.detach()

    return block


def _te(shape: ExpertShape, device: torch.device, recipe: str) -> Block:
    import transformer_engine.pytorch as te

    from megatron_lowprec.te import te_recipe

    asked = get_recipe(recipe)
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": device, "fuse_wgrad_accumulation": True}
    fc1, fc2 = (
        te.GroupedLinear(shape.experts, *sizes, **options)
        for sizes in ((shape.hidden, 2 * shape.ffn), (shape.ffn, shape.hidden))
    )
    weights = [*fc1.parameters(), *fc2.parameters()]
    _give_main_gradients(weights)
    for weight in weights:
        weight.overwrite_main_grad = True  # as ours, in a step's first microbatch

    def block(inputs: Inputs) -> torch.Tensor:
        with te.autocast(recipe=te_recipe(asked)) if asked.quantized else nullcontext():
            y = fc2(_swiglu(fc1(inputs.x, inputs.counts), inputs.probs), inputs.counts)
        y.backward(inputs.dy)
        inputs.x.grad = None
        for weight in weights:
            weight.grad = None
        return y.detach()

    return block
