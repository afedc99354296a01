"""Hopper's FP8 accumulator: the reference's error against float64, and the reference against a GPU's products.

arXiv 2412.19437, section 3.3.2, reports a largest relative error of nearly 2% at K = 4096, of two random matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.gemm.fp8_accumulator import HOPPER, Fp8Accumulator
from megatron_lowprec.kernels.gemm.reference import Product
from megatron_lowprec.kernels.quantize.reference import round_to_format
from megatron_lowprec.lab.accumulator_probe import findings, native_product, reference_product
from megatron_lowprec.lab.dot_products import energy_snr
from megatron_lowprec.lab.experiment import Lab, Result, Table
from megatron_lowprec.lab.lab_figures import Panel, line_panels
from megatron_lowprec.text_tables import Column, Row

LENGTHS = tuple(2**n for n in range(7, 15))
SIZE = 32  # rows and columns of a product
HOPPER_CAPABILITY = (9, 0)
FAST, FULL = HOPPER, replace(HOPPER, promote=128)
MODES = {"fast": FAST, "promoted every 128": FULL}
PUBLISHED = {("uniform", 4096, "fast"): 2.0}  # percent; the paper does not name the distribution
# What the search over parameters tries, if a GPU's products are there to compare with.
CANDIDATES: dict[str, Mapping[str, Any]] = {
    "as above": {},
    "12 fraction bits": {"fraction_bits": 12},
    "14 fraction bits": {"fraction_bits": 14},
    "floor": {"dropping": "floor"},
    "nearest even": {"dropping": "nearest_even"},
    "16 terms": {"group": 16},
    "64 terms": {"group": 64},
}
PROMOTIONS = (None, 64, 128, 256, 512)


def run(lab: Lab) -> Result:
    """The reference's error; on a Hopper GPU, its properties and the share of equal products beside the reference's."""
    lengths = (128, 512) if lab.quick else LENGTHS
    native = _native(lab)
    errors = list(error_rows(lab, lengths))
    tables = [
        Table("error", "error of the reference against float64", ERROR_COLUMNS, errors),
        Table("probe", "crafted sums", _property_columns(native), list(property_rows(native))),
    ]
    notes = [
        f"elements in E4M3, products of {SIZE} by {SIZE}; normal: N(0, 64^2), uniform: [0, 448)",
        "reference: kernels/gemm/fp8_accumulator.py",
    ]
    if native:
        notes.append("equal: share of equal fp32 products; fast_accumulation of torch's scaled GEMM on and off")
        tables.append(Table("equal", "share of equal products", EQUAL_COLUMNS, list(equal_rows(lab, native, lengths))))
        tables.append(Table("search", "parameters, K = 4096", SEARCH_COLUMNS, list(search_rows(lab, native))))
    else:
        notes.append(
            "not run: the GPU's own products. On a Hopper GPU (compute capability 9.0) add --device cuda; "
            f"this is {_device_name(lab)}"
        )
    return Result("Hopper's FP8 accumulator", notes, tables, {"": _figure(errors)})


ERROR_COLUMNS = (
    *(Column(key, key) for key in ("operands", "accumulation")),
    Column("length", "length", "d"),
    Column("snr", "SNR, dB", ".1f"),
    Column("largest", "largest relative\nerror, %", ".3f"),
    Column("mean", "mean relative\nerror, %", "+.3f"),
    Column("published", "published\n%", ".0f"),
)
EQUAL_COLUMNS = (
    *(Column(key, key) for key in ("operands", "accumulation")),
    Column("length", "length", "d"),
    Column("fp32", "equal, fp32", ".4f"),
    Column("bf16", "equal in bf16", ".4f"),
    Column("difference", "largest relative\ndifference", ".2e"),
)
SEARCH_COLUMNS = (
    *(Column(key, key) for key in ("operands", "accumulation", "reference", "promote")),
    Column("fp32", "equal, fp32", ".4f"),
)


def operands(lab: Lab, kind: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 [SIZE, length] of E4M3 numbers, on the CPU."""
    if kind == "normal":
        pair = [64.0 * lab.normal(f"accumulator {name} {length}", SIZE, length) for name in "ab"]
    else:
        pair = [448.0 * lab.uniform(f"accumulator {name} {length}", SIZE, length) for name in "ab"]
    a, b = (round_to_format(x.float().cpu(), FORMATS["e4m3"], "nearest_even") for x in pair)
    return a, b


def error_rows(lab: Lab, lengths: tuple[int, ...]) -> Iterator[Row]:
    """Error of the reference's products, and of fp32 sums, against float64."""
    products: dict[str, Product] = {name: reference_product(each) for name, each in MODES.items()}
    products["fp32"] = lambda a, b: a @ b.t()
    for kind in ("normal", "uniform"):
        for name, product in products.items():
            for length in lengths:
                a, b = operands(lab, kind, length)
                exact = a.double() @ b.double().t()
                found = product(a, b).double()
                relative = 100.0 * (found - exact) / exact
                yield {
                    "operands": kind,
                    "accumulation": name,
                    "length": length,
                    "snr": energy_snr(exact, found) if bool((found != exact).any()) else math.inf,
                    # the largest relative error of sums that may be near 0 has no meaning
                    "largest": float(relative.abs().max()) if kind == "uniform" else None,
                    "mean": float(relative.mean()) if kind == "uniform" else None,
                    "published": PUBLISHED.get((kind, length, name)),
                }


def property_rows(native: Mapping[str, Product]) -> Iterator[Row]:
    """A row a property: what the reference shows and, where there is one, the GPU."""
    found = {f"reference, {name}": findings(reference_product(each)) for name, each in MODES.items()}
    found |= {f"GPU, {name}": findings(product) for name, product in native.items()}
    names = dict.fromkeys(name for each in found.values() for name in each)
    for name in names:
        yield {"property": name, **{source: each.get(name) for source, each in found.items()}}


def equal_rows(lab: Lab, native: Mapping[str, Product], lengths: tuple[int, ...]) -> Iterator[Row]:
    """Share of products in which the GPU and the reference have equal bits."""
    for kind in ("normal", "uniform"):
        for name, product in native.items():
            for length in lengths:
                a, b = operands(lab, kind, length)
                ours, theirs = reference_product(MODES[name])(a, b), product(a, b)
                yield {
                    "operands": kind,
                    "accumulation": name,
                    "length": length,
                    "fp32": _equal(ours, theirs),
                    "bf16": _equal(ours.bfloat16(), theirs.bfloat16()),
                    "difference": float((ours - theirs).abs().max() / theirs.abs().max()),
                }


def search_rows(lab: Lab, native: Mapping[str, Product], length: int = 4096) -> Iterator[Row]:
    """Share of equal products for other parameters of the reference, the largest first."""
    rows: list[dict[str, Any]] = []
    for kind in ("normal", "uniform"):
        a, b = operands(lab, kind, length)
        theirs = {name: product(a, b) for name, product in native.items()}
        for candidate, changes in CANDIDATES.items():
            for promote in PROMOTIONS:
                ours = reference_product(Fp8Accumulator(**{**changes, "promote": promote}))(a, b)
                rows += [
                    {
                        "operands": kind,
                        "accumulation": name,
                        "reference": candidate,
                        "promote": str(promote or "never"),
                        "fp32": _equal(ours, each),
                    }
                    for name, each in theirs.items()
                ]
    yield from sorted(rows, key=lambda row: (row["operands"], row["accumulation"], -row["fp32"]))


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours == theirs).double().mean())


def _native(lab: Lab) -> dict[str, Product]:
    """The GPU's products by accumulation; none without a Hopper GPU."""
    if lab.device.type != "cuda" or torch.cuda.get_device_capability(lab.device) != HOPPER_CAPABILITY:
        return {}
    return {name: native_product(lab.device, fast=each.promote is None) for name, each in MODES.items()}


def _device_name(lab: Lab) -> str:
    return "a CPU" if lab.device.type == "cpu" else torch.cuda.get_device_name(lab.device)


def _property_columns(native: Mapping[str, Product]) -> tuple[Column, ...]:
    sources = [f"reference, {name}" for name in MODES] + [f"GPU, {name}" for name in native]
    return (Column("property", "property"), *(Column(source, source) for source in sources))


def _figure(errors: list[Row]) -> bytes:
    """PNG: SNR against length, a panel for each kind of operands."""
    panels = []
    for kind in ("normal", "uniform"):
        lines = {}
        for name in (*MODES, "fp32"):
            found = [row for row in errors if (row["operands"], row["accumulation"]) == (kind, name)]
            lines[name] = [row["length"] for row in found], [row["snr"] for row in found]
        panels.append(Panel(f"{kind} elements", "length", "SNR against float64, dB", lines, log_x=2))
    return line_panels(panels)
