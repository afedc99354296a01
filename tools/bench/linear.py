"""One linear layer, forward and backward, under each recipe over bf16 in the same run."""

import argparse
from collections.abc import Callable

import torch

from tools.bench.layer import (
    Gemms,
    RecipeGemms,
    Tensors,
    TorchGemms,
    fault,
    plain_torch,
    tensors,
    through_autograd,
    without_autograd,
)
from tools.bench.measure import Bench, Timing, in_turn
from tools.bench.report import Report
from tools.bench.shapes import LinearShape, linears
from tools.bench.table import Column, Row

RECIPES = ("bf16", "mxfp8", "mxfp4", "mxfp4_rht", "mxfp4_sr", "mxfp4_rht_sr")
PLAIN, BARE = "torch F.linear", "torch, bare GEMMs"
COLUMNS = (
    Column("linear", "linear"),
    Column("size", "TxIxO"),
    Column("recipe", "recipe"),
    Column("ms", "ms", ".4f"),
    Column("low", "p20", ".4f"),
    Column("high", "p80", ".4f"),
    Column("noise", "rounds", ".1%"),
    Column("over_bf16", "/bf16", ".3f"),
    Column("over_torch", "/torch", ".3f"),
    Column("graph_ms", "kernels ms", ".4f"),
    Column("graph_over_bf16", "/bf16", ".3f"),
    Column("host_us", "host us", ".0f"),
    Column("tflops", "TFLOP/s", ".0f"),
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Every chosen linear layer under every recipe."""
    generator = torch.Generator(bench.device).manual_seed(args.seed)
    recipes = list(dict.fromkeys(["bf16", *(args.recipes or RECIPES)]))
    faults = {recipe: fault(recipe, bench.device, generator) for recipe in recipes}
    for recipe, reason in faults.items():
        report.progress(f"{recipe}: {reason or 'agrees with the reference'}")
    rows: list[Row] = []
    for shape in linears(args.shapes or ("345m", "1.3b", "6.7b"), args.linears):
        sound = [recipe for recipe, reason in faults.items() if reason is None]
        rows += _rows(shape, sound, args, bench, generator)
        rows += [_named(shape, args.tokens, recipe) | {"failed": reason} for recipe, reason in faults.items() if reason]
        report.progress(f"{shape.model} {shape.name} done")
    reasons = {str(row["no_graph"]) for row in rows if row.get("no_graph")}
    report.note(
        "ms: forward and backward with autograd, the host included where it is slower",
        f"{args.rounds} rounds in turn; 'rounds': the largest difference between their medians",
        f"{PLAIN}: bf16 weight gradient, then main_grad.add_",
        f"{BARE}: three products in one autograd function, the third accumulating in fp32, as every recipe does",
        "kernels ms: GEMMs and casts replayed as a CUDA graph; host us: until the call returns, device idle before it",
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
    shape: LinearShape, recipes: list[str], args: argparse.Namespace, bench: Bench, generator: torch.Generator
) -> list[Row]:
    smallest = 2 * args.tokens * min(shape.in_features, shape.out_features)
    inputs = bench.input_sets(lambda: tensors(shape, args.tokens, bench.device, generator), smallest)
    gemms: dict[str, Gemms] = {BARE: TorchGemms(), **{recipe: RecipeGemms(recipe, bench.device) for recipe in recipes}}
    calls: dict[str, Callable[[Tensors], None]] = {PLAIN: plain_torch}
    calls |= {name: through_autograd(g) for name, g in gemms.items()}
    timings = bench.compare({name: in_turn(inputs, call) for name, call in calls.items()}, args.rounds)
    host = {name: bench.host_microseconds(in_turn(inputs, call)) for name, call in calls.items()}
    graphs: dict[str, Timing | str] = {}
    if not args.no_graph:
        for name, g in gemms.items():
            kernels = without_autograd(g)
            graphs[name] = bench.graph(lambda kernels=kernels: kernels(inputs[0]))  # type: ignore[misc]
    bf16, bf16_graph = timings.get("bf16"), graphs.get("bf16")
    rows: list[Row] = []
    for name, timing in timings.items():
        row = _named(shape, args.tokens, name) | timing.row()
        row |= {
            "noise": timing.noise,
            "over_bf16": timing.ms / bf16.ms if bf16 else None,
            "over_torch": timing.ms / timings[PLAIN].ms,
            "host_us": host[name],
            "tflops": 3 * shape.flops(args.tokens) / timing.ms / 1e9,
        }
        graph = graphs.get(name)
        if isinstance(graph, Timing):
            row["graph_ms"] = graph.ms
            row["graph_over_bf16"] = graph.ms / bf16_graph.ms if isinstance(bf16_graph, Timing) else None
        elif graph is not None:
            row["no_graph"] = f"{name}: {graph}"
        rows.append(row)
    return rows
