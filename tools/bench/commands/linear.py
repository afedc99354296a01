"""One linear layer, forward and backward: each recipe over bf16 in the same run."""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from megatron_lowprec.quantization.device_rng_step import enter_rng_step
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.text_tables import Column, Row
from tools.bench.cases import layer
from tools.bench.measure import Bench, Timing, cycle_inputs, errors, one_line
from tools.bench.peers import layers as peers
from tools.bench.report import Report, spread_columns
from tools.bench.shapes import LinearShape, linears

RECIPES = ("bf16", "mxfp8", "mxfp4", "mxfp4_rht", "mxfp4_sr", "mxfp4_rht_sr")
WITH_PEERS = ("bf16", "fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_blockwise", *RECIPES[1:])
PLAIN, BARE = "torch F.linear", "torch, bare GEMMs"
COLUMNS = (
    *(Column("linear", "linear"), Column("size", "TxIxO"), Column("recipe", "recipe")),
    *spread_columns(),
    Column("over_bf16", "/bf16", ".3f"),
    Column("over_torch", "/torch", ".3f"),
    Column("graph_ms", "kernels ms", ".4f"),
    Column("graph_over_bf16", "/bf16", ".3f"),
    Column("host_us", "host us", ".0f"),
    Column("tflops", "TFLOP/s", ".0f"),
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Every chosen linear layer under every recipe, and in every peer library."""
    generator = torch.Generator(bench.device).manual_seed(args.seed)
    recipes = list(dict.fromkeys(["bf16", *(args.recipes or (WITH_PEERS if args.peers else RECIPES))]))
    faults = {recipe: layer.fault(recipe, bench.device, generator) for recipe in recipes}
    makes, notes = peers.peer_layers(args.peers, bench.device)
    faults |= {row: peers.fault(row, make, bench.device, generator) for row, make in makes.items()}
    for name, reason in faults.items():
        report.progress(f"{name}: {reason or 'agrees with the reference'}")
    rows: list[Row] = []
    for shape in linears(args.shapes or ("345m", "1.3b", "6.7b"), args.linears):
        sound = [recipe for recipe in recipes if faults[recipe] is None]
        sound_makes = {row: make for row, make in makes.items() if faults[row] is None}
        rows += _rows(shape, sound, sound_makes, args, bench, generator)
        rows += [_named(shape, args.tokens, name) | {"failed": reason} for name, reason in faults.items() if reason]
        report.progress(f"{shape.model} {shape.name} done")
    reasons = {str(row["no_graph"]) for row in rows if row.get("no_graph")}
    report.note(
        "ms: forward and backward with autograd, including the host where it is slower",
        f"{args.rounds} rounds in turn; 'rounds': the largest difference between their medians",
        f"{PLAIN}: bf16 weight gradient, then copied to main_grad",
        f"{BARE}: three products in one autograd function, the third in fp32",
        "kernels ms: GEMMs and casts replayed as a CUDA graph; host us: until the call returns, device idle before it",
        *(["cached: as a later microbatch of a step, with a cached weight", *notes] if args.peers else []),
        *(f"no graph: {reason}" for reason in sorted(reasons)),
    )
    report.table(f"linear, forward + backward, bf16, {args.tokens} tokens: {args.device}", rows, COLUMNS)


def _named(shape: LinearShape, tokens: int, recipe: str) -> dict[str, object]:
    return {
        "linear": f"{shape.model} {shape.name}",
        "size": f"{tokens}x{shape.in_features}x{shape.out_features}",
        "recipe": recipe,
    }


def _rows(
    shape: LinearShape,
    recipes: list[str],
    makes: dict[str, peers.Make],
    args: argparse.Namespace,
    bench: Bench,
    generator: torch.Generator,
) -> list[Row]:
    smallest = 2 * args.tokens * min(shape.in_features, shape.out_features)
    inputs = bench.input_sets(lambda: layer.tensors(shape, args.tokens, bench.device, generator), smallest)
    gemms = _gemms(recipes, bench.device, with_cached=bool(args.peers))
    calls: dict[str, Callable[[layer.Tensors], None]] = {PLAIN: layer.plain_torch}
    calls |= {name: layer.through_autograd(g) for name, g in gemms.items()}
    kernels = {name: layer.without_autograd(g) for name, g in gemms.items()}
    failed: list[Row] = []
    for name, make in makes.items():
        try:
            call = make(inputs[0])
            call(inputs[0])
            calls[name] = kernels[name] = call
        except errors() as error:
            failed.append(_named(shape, args.tokens, name) | {"failed": one_line(error)})
    cycled = {name: cycle_inputs(inputs, call) for name, call in calls.items()}
    timings = bench.compare(cycled, args.rounds)
    host = {name: bench.host_microseconds(call) for name, call in cycled.items()}
    if bench.on_gpu:
        enter_rng_step(RngStep(0, 0), bench.device)  # which the graphs' draws read
    graphs = {name: bench.graph(partial(call, inputs[0])) for name, call in kernels.items()}
    bf16, bf16_graph = timings.get("bf16"), graphs.get("bf16")
    rows: list[Row] = []
    for name, timing in timings.items():
        row = _named(shape, args.tokens, name) | timing.row()
        row["over_bf16"] = timing.ms / bf16.ms if bf16 else None
        row["over_torch"] = timing.ms / timings[PLAIN].ms
        row["host_us"] = host[name]
        row["tflops"] = 3 * shape.flops(args.tokens) / timing.ms / 1e9
        graph = graphs.get(name)
        if isinstance(graph, Timing):
            row["graph_ms"] = graph.ms
            row["graph_over_bf16"] = graph.ms / bf16_graph.ms if isinstance(bf16_graph, Timing) else None
        elif graph is not None:
            row["no_graph"] = f"{name}: {graph}"
        rows.append(row)
    return rows + failed


def _gemms(recipes: list[str], device: torch.device, with_cached: bool) -> dict[str, layer.Gemms]:
    """Row -> GEMMs of plain torch, of each recipe, and of each recipe with cached weights if it can cache them."""
    gemms: dict[str, layer.Gemms] = {BARE: layer.TorchGemms()}
    for recipe in recipes:
        gemms[recipe] = layer.RecipeGemms(recipe, device)
        if with_cached and layer.keeps_weights(recipe):
            gemms[f"{recipe}, cached"] = layer.RecipeGemms(recipe, device, cached=True)
    return gemms
