"""Bandwidth of the quantizers in blocks, bf16 in and dequantized bf16 out, as a share of a plain copy's.

Bytes are the minimum that a variant must move: the input read once, and once more for the tensor scale of NVFP4, each
output written once. A variant is timed only
if its bits equal the reference's on this machine.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.quantize.rule import Direction, MxRule
from megatron_lowprec.quantization.device_rng_step import device_rng_step
from megatron_lowprec.quantization.quantizer import mx_rule, quantize_by_reference, with_amaxes
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.registry import MXFP4, MXFP4_SR, MXFP8, NVFP4, NVFP4_16X16
from megatron_lowprec.recipe.schema import HadamardSpec, QuantSpec
from megatron_lowprec.text_tables import Column, Row, named
from tools.bench.measure import Bench, Copy, Timing, cycle_inputs, errors_as_faults, rate
from tools.bench.report import Report, spread_columns
from tools.bench.shapes import linears

FORMAT_NAMES = ("e2m1", "e4m3", "nvfp4")
KINDS = ("nearest", "sr", "rht64", "rht64+sr", "h16", "h16+sr", "square")
DIRECTIONS = ("rows", "columns", "both")
COLUMNS = (
    *named("format", "kind", "direction", "size"),
    *spread_columns(),
    Column("tb_s", "TB/s", ".2f"),
    Column("of_large_copy", "of large copy", ".1%"),
    Column("of_same_copy", "of same-size copy", ".1%"),
)

_RNG_STEP = RngStep(3, 1)
_KEYS = {"rows": (0x2468ACE1, 0x13579BDF), "columns": (0x0F1E2D3C, 0xF00DCAFE)}
_SIGN_KEYS = {"rows": (0x11111111, 0x22222222), "columns": (0x33333333, 0x44444444)}
# An odd number of rows, and one for which Triton compiles the kernel that is timed.
_CHECKED_SIZES = ((777, 1024), (2048, 512))


@dataclass(frozen=True)
class Variant:
    """One variant of the quantizer."""

    format: str
    kind: str
    direction: str
    spec: QuantSpec

    def transform(self, way: str) -> HadamardSpec | None:
        """The Hadamard transform along "rows" or "columns": NVFP4's, of 16 entries, is along columns only."""
        if self.kind.startswith("h16"):
            return HadamardSpec(16, signs="nvfp4", output="operand") if way == "columns" else None
        return HadamardSpec(64) if self.kind.startswith("rht64") else None

    @property
    def directions(self) -> tuple[str, ...]:
        """The operands that it writes."""
        return ("rows", "columns") if self.direction == "both" else (self.direction,)

    @property
    def rule(self) -> MxRule:
        """Of the kernel."""
        rule = mx_rule(self.spec, next(filter(None, map(self.transform, self.directions)), None))
        assert rule is not None
        return rule

    def moved_bytes(self, entries: int) -> int:
        """Bytes read once, or twice for an amax, and written once per direction; square blocks share one output."""
        reads = 1 if self.spec.tensor_scale is None else 2
        return 2 * entries * (reads + (1 if self.kind == "square" else len(self.directions)))


def variants(formats: Sequence[str], kinds: Sequence[str], directions: Sequence[str]) -> list[Variant]:
    """All combinations that a recipe has: ``mxfp4``, ``mxfp4_sr`` and ``mxfp8``, and operands of NVFP4."""
    specs = {"e2m1": MXFP4, "e4m3": MXFP8, "nvfp4": NVFP4}

    def spec(name: str, kind: str) -> QuantSpec:
        if kind == "square":
            return NVFP4_16X16
        if not kind.endswith("sr"):
            return specs[name]
        return MXFP4_SR if name == "e2m1" else replace(specs[name], rounding="stochastic")

    def exists(name: str, kind: str, way: str) -> bool:
        only_nvfp4 = kind.startswith("h16") or kind == "square"
        other = kind.startswith("rht64")
        return not (other if name == "nvfp4" else only_nvfp4) and not (kind.startswith("h16") and way == "rows")

    found = [(name, kind, way) for name in formats for kind in kinds for way in directions if exists(name, kind, way)]
    return [Variant(name, kind, way, spec(name, kind)) for name, kind, way in found]


def run_kernel(x: torch.Tensor, variant: Variant, signs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One call of the fused kernel, and of that for the amaxes, timed. ``signs``: scaled signs by direction."""
    from megatron_lowprec.kernels.quantize.triton import quantize_mx

    ways = {way: Direction(Key.of(_KEYS[way]), signs.get(way)) for way in variant.directions}
    rule = variant.rule
    found = with_amaxes(x, rule, ways.get("rows"), ways.get("columns"))
    rng_step = device_rng_step(_RNG_STEP, x.device)
    cast = quantize_mx(x, rule, rows=found["rows"], columns=found["columns"], rng_step=rng_step)
    made = {"rows": cast.rowwise_data, "columns": None if cast.columnwise_data is None else cast.columnwise_data.t()}
    return {way: out for way, out in made.items() if out is not None}


def transform_of(variant: Variant, way: str) -> Transform | None:
    """The transform of a direction, with its draw of signs."""
    spec = variant.transform(way)
    return None if spec is None else Transform(spec, RandomStream(_SIGN_KEYS[way]), _RNG_STEP)


def kernel_signs(variant: Variant, device: torch.device) -> dict[str, torch.Tensor]:
    """Scaled signs of each transformed direction."""
    found = {way: transform_of(variant, way) for way in variant.directions}
    return {way: transform.scaled_signs(device) for way, transform in found.items() if transform is not None}


def run_reference(x: torch.Tensor, variant: Variant, way: str) -> torch.Tensor:
    """The same operand by the reference, in the layout of x; along columns with the padding that a transform fills."""
    stream, transform = RandomStream(_KEYS[way], _RNG_STEP), transform_of(variant, way)
    matrix = x.t() if way == "columns" else x
    made = quantize_by_reference(matrix, variant.spec, stream, transform, dequantize=True).data.to(x.dtype)
    return made.t() if way == "columns" else made


@errors_as_faults
def fault(variant: Variant, device: torch.device, generator: torch.Generator) -> str | None:
    """The kernel's difference from the reference on random inputs; None if all bits agree."""
    sizes = _CHECKED_SIZES if device.type == "cuda" else ((45, 128),)
    for rows, columns in sizes:
        x = random_input(rows, columns, device, generator)
        expected = {way: run_reference(x, variant, way) for way in variant.directions}
        # Freed at once, so that the kernel's outputs probably start as NaN, which reveals unwritten entries.
        poison = [torch.full_like(x, torch.nan) for _ in expected]
        del poison
        found = run_kernel(x, variant, kernel_signs(variant, device))
        for way, want in expected.items():
            where = f"{rows}x{columns} along {way}"
            if found[way].shape != want.shape:
                return f"{where}: shape {tuple(found[way].shape)}, the reference has {tuple(want.shape)}"
            different = int((found[way].view(torch.int16) != want.contiguous().view(torch.int16)).sum())
            if different:
                return f"{where}: {different} of {want.numel()} entries differ from the reference"
    return None


def random_input(rows: int, columns: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """bf16 normal numbers with rows and columns scaled by powers of two, and one block of zeros."""
    x = torch.randn(rows, columns, generator=generator, device=device)
    for shape in ((rows, 1), (1, columns)):
        x *= torch.randint(-6, 7, shape, generator=generator, device=device).float().exp2()
    x[:, :32] = 0.0
    return x.to(torch.bfloat16)


def sizes_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    """(rows, columns) to time: --sizes, or with --shapes the activations and weights of these linear layers.

    Raises:
        UserError: a size that is not ROWSxCOLUMNS or whose columns are no multiple of 64.
    """
    if args.shapes is not None:
        found = [
            size
            for linear in linears(args.shapes, args.linears)
            for size in ((args.tokens, linear.in_features), (linear.out_features, linear.in_features))
        ]
        return sorted(set(found))
    sizes = []
    for text in args.sizes.split(","):
        rows, _, columns = text.partition("x")
        if not (rows.isdecimal() and columns.isdecimal()) or int(columns) % 64 or not int(rows):
            raise UserError(f"--sizes {text}: must be ROWSxCOLUMNS, columns a multiple of 64, such as 8192x4096")
        sizes.append((int(rows), int(columns)))
    return sizes


def run(args: argparse.Namespace, bench: Bench, report: Report) -> None:
    """Check every variant, then time the correct ones at every size, with a copy of that size."""
    large = bench.copy(args.copy_bytes)
    generator = torch.Generator(bench.device).manual_seed(args.seed)
    faults = {}
    for variant in variants(args.formats, args.kinds, args.directions):
        faults[variant] = fault(variant, bench.device, generator)
        report.progress(f"{variant.format} {variant.kind} {variant.direction}: {faults[variant] or 'bits agree'}")
    sound = [variant for variant, reason in faults.items() if reason is None]
    timed = {size: _timed(size, sound, args, bench, generator) for size in sizes_of(args)}
    again = bench.copy(args.copy_bytes)
    best = max(large.terabytes_per_second, again.terabytes_per_second)
    copies = {"large": large, "large, at the end": again}
    rows: list[Row] = []
    for size, (same, timings) in timed.items():
        copies["{}x{} bf16".format(*size)] = same
        for variant, reason in faults.items():
            row = {"format": variant.format, "kind": variant.kind, "direction": variant.direction}
            row["size"] = "{}x{}".format(*size)
            if reason is None:
                rows.append(row | _row(variant.moved_bytes(size[0] * size[1]), timings[variant], best, same))
            else:
                rows.append(row | {"failed": reason})
    report.note(
        *(
            f"copy, {name}: {c.terabytes_per_second:.2f} TB/s, {c.moved_bytes >> 20} MiB moved"
            for name, c in copies.items()
        ),
        f"shares of the faster large copy; {args.rounds} rounds in turn; inputs drawn with --seed {args.seed}",
    )
    title = f"quantize: {args.device}, bf16 -> dequantized bf16"
    report.table(title, rows, COLUMNS, copies={name: copy.row() for name, copy in copies.items()})


def _timed(
    size: tuple[int, int], sound: Sequence[Variant], args: argparse.Namespace, bench: Bench, generator: torch.Generator
) -> tuple[Copy, dict[Variant | None, Timing]]:
    """A copy of that size, and the time of each variant."""
    tensor_bytes = 2 * size[0] * size[1]
    inputs = bench.input_sets(partial(random_input, *size, bench.device, generator), tensor_bytes)

    def call(variant: Variant) -> Callable[[], object]:
        signs = kernel_signs(variant, bench.device)
        return cycle_inputs(inputs, lambda x: run_kernel(x, variant, signs))

    calls: dict[Variant | None, Callable[[], object]] = {None: bench.copy_call(tensor_bytes)}
    calls |= {variant: call(variant) for variant in sound}
    timings = bench.compare(calls, args.rounds)
    return Copy(2 * tensor_bytes, timings[None].ms), timings


def _row(moved: int, timing: Timing, large: float, same: Copy) -> dict[str, Any]:
    reached = rate(moved, timing.ms)
    return timing.row() | {
        "moved_bytes": moved,
        "tb_s": reached,
        "of_large_copy": reached / large,
        "of_same_copy": reached / same.terabytes_per_second,
    }
