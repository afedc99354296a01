"""This project's vectors: formats, scale rules, and the operands of all registered recipes, from the reference.

Inputs and draws are integer arithmetic, so that every machine and every torch makes the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import pairwise

import torch

from megatron_lowprec.conformance.vectors import Case, Group, Tensors
from megatron_lowprec.formats import ELEMENT_FORMATS, FORMATS, Format
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.elements import packed
from megatron_lowprec.kernels.quantize.reference import (
    decode,
    e8m0_decode_scale,
    e8m0_scale,
    encode,
    round_to_format,
)
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.quant_spec import QuantSpec
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, HadamardSpec
from megatron_lowprec.scaling import SCALE_RULES
from megatron_lowprec.shipped import SHIPPED

_ROWS, _COLUMNS = 32, 256
_PEER = "megatron_lowprec"
Operand = tuple[QuantSpec, HadamardSpec | None]


def reference_inputs() -> Tensors:
    """Inputs by name: matrices [R, K], and the vectors ``points`` of numbers to round and ``amaxes``."""
    normal = _normal(_ROWS, _COLUMNS, seed=1)
    exponents = _hashed(_ROWS * _COLUMNS, 2).view(_ROWS, _COLUMNS) % 40 - 30
    edges = _normal(8, _COLUMNS, seed=3)
    for row, power in enumerate((-126, -140, 120, 126)):  # subnormal and huge numbers; then zeros
        edges[row] *= 2.0**power
    edges[4:6, ::3] = 0.0
    edges[6, :128] = 0.0
    edges[7] = -0.0
    nonfinite = _normal(8, _COLUMNS, seed=4)
    nonfinite[1, 5], nonfinite[3, 130], nonfinite[6, 77] = torch.nan, torch.inf, -torch.inf
    return {
        "normal": normal,
        "normal_bf16": normal.bfloat16(),
        "wide": torch.ldexp(normal, exponents),
        "edges": edges,
        "nonfinite": nonfinite,
        "ragged": _normal(20, 208, seed=5),
        "points": _points(),
        "amaxes": _points().abs(),
        **{f"ties_{fmt.name}": _ties(fmt) for fmt in ELEMENT_FORMATS.values()},
    }


def reference_cases(only: str = "") -> Iterator[Case]:
    """All cases whose names match the regular expression ``only`` somewhere."""
    makers: dict[str, Callable[[], Case]] = {
        f"format_{fmt.name}": partial(_format_case, fmt) for fmt in FORMATS.values()
    }
    makers["format_e8m0"] = _e8m0_case
    makers |= {users[0]: partial(_operand_case, *operand, users) for operand, users in recipe_operands().items()}
    for name, make in makers.items():
        if re.search(only, name):
            yield make()


def recipe_operands() -> dict[Operand, list[str]]:
    """Different quantizers of registered and shipped recipes -> operands that have them, as RECIPE.GEMM.OPERAND."""
    found: dict[Operand, list[str]] = {}
    shipped = sorted((SHIPPED / "configs/recipes").glob("*.yaml"))
    for recipe in [*map(get_recipe, recipes()), *(load_recipe(str(path)) for path in shipped)]:
        for gemm, operands in GEMM_OPERANDS.items():
            for operand in operands:
                spec = getattr(recipe.gemms[gemm], operand)
                if spec is not None:
                    # x is what is rounded, wherever it and its amax come from
                    same = replace(spec, source="original", history=1, history_rule="max", history_update="step")
                    found.setdefault((same, recipe.gemms[gemm].hadamard), []).append(f"{recipe.name}.{gemm}.{operand}")
    return found


def _format_case(fmt: Format) -> Case:
    """Values of all codes, and codes of numbers by both kinds of nearest rounding, saturating."""
    points = _inputs()["points"]
    points = points if fmt.signed else points.abs()
    rounded = {
        "codes": encode(round_to_format(points, fmt, "nearest_even"), fmt),
        "half_away.codes": encode(round_to_format(points, fmt, "half_away"), fmt),
    }
    values = decode(torch.arange(1 << fmt.bits), fmt)
    groups = (Group("decode", None, {}, {"values": values}), Group("points", _inputs()["points"], {}, rounded))
    return Case(f"format_{fmt.name}", {"peer": _PEER, "format": fmt.name}, groups)


def _e8m0_case() -> Case:
    """Values of all bytes, and bytes of amaxes by each rule, for each element format."""
    amaxes = _inputs()["amaxes"]
    rules = [row.name for row in SCALE_RULES.values() if "e8m0" in row.scale_formats]
    scales = {
        f"{fmt.name}.{rule}.scale_e8m0": e8m0_scale(amaxes, fmt, rule)
        for fmt in ELEMENT_FORMATS.values()
        for rule in rules
    }
    values = e8m0_decode_scale(torch.arange(256))
    groups = (Group("decode", None, {}, {"values": values}), Group("amaxes", amaxes, {}, scales))
    return Case("format_e8m0", {"peer": _PEER}, groups)


def _operand_case(spec: QuantSpec, hadamard: HadamardSpec | None, users: list[str]) -> Case:
    whole = spec.scale_format == "e8m0" or hadamard is not None
    names = ["normal", "normal_bf16", "wide", "edges", "nonfinite", f"ties_{spec.format}"]
    groups = tuple(_operand_group(each, spec, hadamard) for each in names + ["ragged"] * (not whole))
    meta = {"peer": _PEER, "format": spec.format, "operands": " ".join(users), "spec": json.dumps(asdict(spec))}
    if hadamard is not None:
        meta["hadamard"] = json.dumps(asdict(hadamard))
    return Case(users[0], meta, groups)


def _operand_group(name: str, spec: QuantSpec, hadamard: HadamardSpec | None) -> Group:
    x, given, matrix = _inputs()[name], Tensors(), _inputs()[name]
    if hadamard is not None:
        drawn = 1 - 2 * (_hashed(hadamard.block, 6) >> 8 & 1)
        signs = drawn if hadamard.signs == "random" else torch.tensor(hadamard.fixed_signs)
        given["sign"] = signs.to(torch.int8)
        matrix = transformed(x, given["sign"], hadamard.output)
    if spec.random:
        bits = _hashed(x.numel(), 7).view(x.shape) >> 32 - spec.random_bits
        given["noise"] = (bits + 0.5).float() / 2**spec.random_bits
    if spec.scaling == "delayed":
        given["amax"] = 0.75 * x.float().nan_to_num(0.0, 0.0, 0.0).abs().amax().view(1)
    data, scale, of_tensor = quantize_by_reference(
        matrix,
        spec,
        given.get("noise"),
        tensor_amax=given.get("amax"),
        group=None if hadamard is None else hadamard.block,
    )
    return Group(name, x, given, operand_results(spec, data, scale, of_tensor))


def transformed(x: torch.Tensor, sign: torch.Tensor, output: str) -> torch.Tensor:
    """x [R, K] behind a Hadamard transform by these signs; ``output`` as in ``HadamardSpec``."""
    matrix = hadamard_transform(x, sign.float())
    return matrix.to(x.dtype) if output == "operand" else matrix


def operand_results(
    spec: QuantSpec, data: torch.Tensor, scale: torch.Tensor, of_tensor: torch.Tensor | None
) -> Tensors:
    """Results by their keys, from data [R, K] on the format's grid and decode scales: codes of 4 bits two a byte."""
    codes = encode(data, FORMATS[spec.format])
    if FORMATS[spec.format].bits == 4:
        codes = packed(codes)
    key = "scale_inv" if spec.scale_format == "fp32" else f"scale_{spec.scale_format}"
    return {"codes": codes, key: scale} | ({} if of_tensor is None else {"tensor_scale": of_tensor})


@cache
def _inputs() -> Tensors:
    return reference_inputs()


def _hashed(count: int, seed: int) -> torch.Tensor:
    """int64 [count] of 32 mixed bits each."""
    z = torch.arange(count) + seed * 0x9E3779B9 & 0xFFFFFFFF
    for shift in (16, 15, 16):
        z = (z ^ z >> shift) * 0x045D9F3B & 0xFFFFFFFF
    return z ^ z >> 16


def _normal(rows: int, columns: int, seed: int) -> torch.Tensor:
    """fp32 [rows, columns], about standard normal: sums of four uniform numbers, exact until one product."""
    uniform = torch.stack([_hashed(rows * columns, 16 * seed + part) >> 12 for part in range(4)])
    return ((uniform.sum(0) - (1 << 21)).float() * (2.0**-20 * 1.75)).view(rows, columns)


def _points() -> torch.Tensor:
    """fp32 vector of numbers to round: over 48 binades, and each format's values, midpoints and their neighbours."""
    bits = _hashed(4096, 8)
    spread = ((bits >> 6) % 48 + 100 << 23) | (bits * 2654435761 & 0x7FFFFF) | (bits & 1) << 31
    points = [spread.to(torch.int32).view(torch.float32)]
    for fmt in FORMATS.values():
        grid = _grid(fmt)
        between = torch.tensor([(low + high) / 2 for low, high in pairwise(grid.tolist())])
        for numbers in (grid, between):
            points += [
                numbers,
                -numbers,
                torch.nextafter(numbers, torch.zeros(1)),
                torch.nextafter(numbers, 2 * numbers),
            ]
    return torch.cat(points)


def _grid(fmt: Format) -> torch.Tensor:
    """Nonnegative finite values, ascending."""
    values = decode(torch.arange(1 << fmt.exponent_bits + fmt.mantissa_bits), fmt)
    return values[values.isfinite()]


def _ties(fmt: Format) -> torch.Tensor:
    """fp32 [8, K]: midpoints of the format in blocks of 16 that begin with its maximum; each row has a power of two."""
    grid = _grid(fmt)
    between = (grid[:-1] + grid[1:]) / 2
    picked = between[_hashed(8 * _COLUMNS, 9) % len(between)].view(8, _COLUMNS)
    signs = 1.0 - 2.0 * (_hashed(8 * _COLUMNS, 10) & 1).view(8, _COLUMNS)
    picked[:, ::16] = fmt.max
    return torch.ldexp(picked * signs, torch.arange(-4, 4).view(8, 1))
