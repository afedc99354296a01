"""The cost of the Hadamard transform and of stochastic rounding.

Table 1 (``fp8``), the paper's overhead experiment: for each linear layer, both GEMM operands are cast from bf16 to FP8
E4M3 with one given scale and multiplied, with and without RHT64 inside the cast. Table 2 (``backward``): dgrad and
wgrad of a decoder layer's four linears under the MXFP4 recipes.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.text_tables import Column, Row, named
from tools.bench.cases import layer
from tools.bench.measure import Bench, Timing, distance, errors_as_faults, rate
from tools.bench.report import Report
from tools.bench.shapes import LinearShape, models

GROUP = 64
RECIPES = ("bf16", "mxfp4", "mxfp4_rht", "mxfp4_sr", "mxfp4_rht_sr")
PAPER = {"7b": 0.097, "70b": 0.016}
PAPER_SAYS = (
    "arXiv 2502.20586, section 4.2: on an H100, a Triton kernel that adds the RHT to an FP8 GEMM costs 9.7% at Llama-2 "
    "7B's and 1.6% at 70B's matrix sizes; tokens, which matrices, and whether a cast is counted are not stated",
    "added: (cast+RHT64+GEMM) / (cast+GEMM) - 1, both sides timed whole, in turn",
    "by parts: (cast+RHT64 - cast) / (cast+GEMM), the casts timed alone",
    "over GEMM alone: (cast+RHT64+GEMM - (cast+GEMM)) / GEMM on operands in FP8 already",
)
FP8_COLUMNS = (
    Column("linear", "linear"),
    Column("size", "TxKxN"),
    Column("gemm_ms", "GEMM ms", ".4f"),
    Column("cast_ms", "cast", ".4f"),
    Column("rht_cast_ms", "cast+RHT", ".4f"),
    Column("base_ms", "cast+GEMM", ".4f"),
    Column("rht_ms", "cast+RHT+GEMM", ".4f"),
    Column("added", "added", ".2%"),
    Column("by_parts", "by parts", ".2%"),
    Column("noise", "rounds", ".2%"),
    Column("over_gemm", "over GEMM alone", ".2%"),
    Column("paper", "paper, H100", ".1%"),
    Column("cast_of_copy", "cast of copy", ".0%"),
    Column("rht_cast_of_copy", "+RHT of copy", ".0%"),
)
BACKWARD_COLUMNS = (
    *named("model", "recipe"),
    Column("ms", "backward ms", ".4f"),
    Column("noise", "rounds", ".2%"),
    Column("over_bf16", "/bf16", ".3f"),
    Column("rht", "of it RHT", ".2%"),
    Column("sr", "of it SR", ".2%"),
    Column("graph_ms", "kernels ms", ".4f"),
)


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Both tables, or the one of --only."""
    names = args.shapes or ("7b", "70b")
    generator = torch.Generator(bench.device).manual_seed(args.seed)
    if args.only != "backward":
        _fp8(names, args, bench, report, generator)
    if args.only != "fp8":
        _backward(names, args, bench, report, generator)


# ---- cast + RHT + FP8 GEMM
class CastAndMultiply:
    """One linear's forward product from bf16 operands, with or without the transform in the casts."""

    def __init__(self, shape: LinearShape, args: argparse.Namespace, bench: Bench, generator: torch.Generator) -> None:
        from tools.bench.cases import cast_kernel as kernels

        t = layer.tensors(shape, args.tokens, bench.device, generator)
        self.operands = (t.x.detach(), t.weight.detach())
        # Half of what maps the largest entry to the format's maximum: the transform can produce a larger one.
        self.scales = [kernels.E4M3_MAX / 2 / x.abs().max().float().view(1) for x in self.operands]
        self.inverses = [(1.0 / scale).view(()) for scale in self.scales]
        self.signs = torch.randint(0, 2, (GROUP,), generator=generator, device=bench.device) * 2.0 - 1.0
        self.scaled_signs = self.signs * GROUP**-0.5
        self.fast = not args.full_accumulation
        self.kernels = kernels
        self.tiles = {"cast": kernels.CAST_TILES[1], "rht": kernels.HADAMARD_TILES[1]}

    def cast(self) -> list[torch.Tensor]:
        """Both operands in FP8."""
        pairs = zip(self.operands, self.scales, strict=True)
        return [self.kernels.cast(x, scale, self.tiles["cast"]) for x, scale in pairs]

    def rht_cast(self) -> list[torch.Tensor]:
        """Both operands transformed, in FP8."""
        pairs = zip(self.operands, self.scales, strict=True)
        return [self.kernels.hadamard_cast(x, scale, self.scaled_signs, self.tiles["rht"]) for x, scale in pairs]

    def multiply(self, operands: list[torch.Tensor]) -> torch.Tensor:
        """The FP8 GEMM, bf16 out."""
        a, b = operands
        scales = {"scale_a": self.inverses[0], "scale_b": self.inverses[1]}
        return torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=self.fast)

    def calls(self) -> dict[str, Callable[[], object]]:
        """The calls to time."""
        ready = self.cast()
        return {
            "gemm": lambda: self.multiply(ready),
            "cast": self.cast,
            "rht_cast": self.rht_cast,
            "base": lambda: self.multiply(self.cast()),
            "rht": lambda: self.multiply(self.rht_cast()),
        }

    def choose_tiles(self, bench: Bench) -> dict[str, tuple[int, int]]:
        """Take each kernel's fastest tile, found by timing all of them."""
        kinds = (("cast", self.cast, self.kernels.CAST_TILES), ("rht", self.rht_cast, self.kernels.HADAMARD_TILES))
        for name, call, tiles in kinds if bench.on_gpu else ():
            taken = {}
            for tile in tiles:
                self.tiles[name] = tile
                taken[tile] = bench.time(call).ms
            self.tiles[name] = min(taken, key=lambda tile: taken[tile])
        return dict(self.tiles)

    @errors_as_faults
    def fault(self) -> str | None:
        """A difference of the casts' bits from the reference or of a product from the fp32 one; None without."""
        transformed = [hadamard_transform(x, self.signs) for x in self.operands]
        limit = self.kernels.E4M3_MAX
        for name, found, sources in (
            ("cast", self.cast(), [x.float() for x in self.operands]),
            ("cast with RHT", self.rht_cast(), transformed),
        ):
            for ours, source, scale in zip(found, sources, self.scales, strict=True):
                want = (source * scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
                different = int((ours.view(torch.uint8) != want.view(torch.uint8)).sum())
                if different:
                    return f"{name}: {different} of {want.numel()} codes differ from the reference"
        exact = self.operands[0].float() @ self.operands[1].float().t()
        for name, product in (("GEMM", self.multiply(self.cast())), ("GEMM after RHT", self.multiply(self.rht_cast()))):
            if not (error := distance(product, exact)) < 0.06:
                return f"{name} differs from the fp32 product by {error:.1e}"
        return None


def _fp8(
    names: Sequence[str], args: argparse.Namespace, bench: Bench, report: Report, generator: torch.Generator
) -> None:
    tokens, inputs, outputs = (272, 256, 384) if bench.on_gpu else (40, 64, 48)
    small, few = LinearShape("check", "check", inputs, outputs), argparse.Namespace(**{**vars(args), "tokens": tokens})
    reason = CastAndMultiply(small, few, bench, generator).fault()
    rows: list[Row] = []
    copy = bench.copy(args.copy_bytes)
    for model in models(names):
        parts: list[dict[str, Timing]] = []
        moved = 0
        for shape in model.linears:
            size = f"{args.tokens}x{shape.in_features}x{shape.out_features}"
            row: dict[str, Any] = {"linear": f"{model.name} {shape.name}", "size": size}
            if reason is not None:
                rows.append(row | {"failed": reason})
                continue
            work = CastAndMultiply(shape, args, bench, generator)
            tiles = work.choose_tiles(bench)
            parts.append(bench.compare(work.calls(), args.rounds))
            # bf16 read, FP8 written
            shape_moved = 3 * sum(x.numel() for x in work.operands)
            rows.append(row | _fp8_row(parts[-1:], shape_moved, copy.terabytes_per_second) | {"tiles": tiles})
            moved += shape_moved
            report.progress(f"{model.name} {shape.name} done, tiles {tiles}")
        if parts:
            total = _fp8_row(parts, moved, copy.terabytes_per_second)
            rows.append({"linear": f"{model.name} layer", "size": "sum", "paper": PAPER.get(model.name)} | total)
    sums = "full" if args.full_accumulation else "fast"
    report.note(*PAPER_SAYS, f"large copy {copy.terabytes_per_second:.2f} TB/s; {args.rounds} rounds in turn")
    title = f"overhead: casts to E4M3, RHT{GROUP}, FP8 GEMM ({sums} sums), {args.tokens} tokens: {args.device}"
    report.table(title, rows, FP8_COLUMNS, copy=copy.row(), paper=PAPER_SAYS)


def _fp8_row(parts: list[dict[str, Timing]], moved: int, copy_rate: float) -> dict[str, Any]:
    """The row of one linear layer, or of the sum of several."""
    ms = {name: sum(part[name].ms for part in parts) for name in parts[0]}
    return {f"{name}_ms": value for name, value in ms.items()} | {
        "added": ms["rht"] / ms["base"] - 1,
        "by_parts": (ms["rht_cast"] - ms["cast"]) / ms["base"],
        "over_gemm": (ms["rht"] - ms["base"]) / ms["gemm"],
        "noise": max(part[name].noise for part in parts for name in ("base", "rht")),
        "cast_of_copy": rate(moved, ms["cast"]) / copy_rate,
        "rht_cast_of_copy": rate(moved, ms["rht_cast"]) / copy_rate,
    }


# ---- shares of a decoder layer's backward
def _backward(
    names: Sequence[str], args: argparse.Namespace, bench: Bench, report: Report, generator: torch.Generator
) -> None:
    recipes = list(dict.fromkeys(["bf16", *(args.recipes or RECIPES)]))
    faults = {recipe: layer.fault(recipe, bench.device, generator) for recipe in recipes}
    sound = [recipe for recipe, reason in faults.items() if reason is None]
    rows: list[Row] = [
        {"model": "all", "recipe": recipe, "failed": reason} for recipe, reason in faults.items() if reason
    ]
    for model in models(names):
        inputs = [layer.tensors(shape, args.tokens, bench.device, generator) for shape in model.linears]
        calls = {recipe: _all_backwards(recipe, inputs, bench.device) for recipe in sound}
        timings = bench.compare(calls, args.rounds)
        graphs = {recipe: bench.graph(call) for recipe, call in calls.items()}
        for recipe, timing in timings.items():
            row = {"model": model.name, "recipe": recipe} | timing.row() | _shares(timings, recipe)
            graph = graphs[recipe]
            rows.append(row | ({"graph_ms": graph.ms} if isinstance(graph, Timing) else {"no_graph": graph}))
        report.progress(f"{model.name} backward done")
    report.note(
        "backward: dgrad and wgrad (into fp32 main_grad) of qkv, proj, fc1 and fc2 in sequence, without autograd",
        "attention, norms and activations are left out, so the shares are upper bounds for the whole layer",
        "of it RHT: 1 - (the same recipe without RHT) / (this one); of it SR: likewise",
    )
    report.table(
        f"overhead: backward of a layer's linears, {args.tokens} tokens: {args.device}", rows, BACKWARD_COLUMNS
    )


def _all_backwards(recipe: str, inputs: list[layer.Tensors], device: torch.device) -> Callable[[], None]:
    gemms = [layer.RecipeGemms(recipe, device) for _ in inputs]

    @torch.no_grad()
    def call() -> None:
        for one, t in zip(gemms, inputs, strict=True):
            one.begin_step()
            one.backward(t.dy, layer.unquantized(t.x, t.weight), t.main_grad)

    return call


def _shares(timings: dict[str, Timing], recipe: str) -> dict[str, float | None]:
    """Shares of transform and stochastic rounding in a recipe's time, from the recipes without one of them."""

    def without(part: str) -> float | None:
        other = timings.get(recipe.replace(part, ""))
        return 1 - other.ms / timings[recipe].ms if part in recipe and other is not None else None

    bf16 = timings.get("bf16")
    return {"over_bf16": timings[recipe].ms / bf16.ms if bf16 else None, "rht": without("_rht"), "sr": without("_sr")}
