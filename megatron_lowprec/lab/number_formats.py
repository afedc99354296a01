"""The grid of each format, its relative error against the spread of the numbers, and the error of block formats."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from megatron_lowprec.formats import ELEMENT_FORMATS, FORMATS, Format
from megatron_lowprec.kernels.quantize.reference import decode, round_to_format
from megatron_lowprec.lab.dot_products import Scheme, energy_snr, quantized_vectors, transformed
from megatron_lowprec.lab.experiment import Lab, Result, Table
from megatron_lowprec.lab.fp4_schemes import FP4_SCHEMES
from megatron_lowprec.lab.lab_figures import Panel, line_panels
from megatron_lowprec.recipe.quant_spec import QuantSpec
from megatron_lowprec.recipe.registry import MXFP4, MXFP4_SR, MXFP8
from megatron_lowprec.text_tables import Column, Row

LENGTH = 4096  # of vectors, which are tensors with one scale of their own under NVFP4
BINADES = 40  # standard deviations from the format's maximum downwards, two a binade
# Format: largest, smallest normal, smallest number. OCP 8-bit Floating Point v1.0, table 1; OCP MX v1.0, tables 1 to 5.
PUBLISHED = {
    "e4m3": (448.0, 2.0**-6, 2.0**-9),
    "e5m2": (57344.0, 2.0**-14, 2.0**-16),
    "e2m3": (7.5, 1.0, 0.125),
    "e3m2": (28.0, 0.25, 0.0625),
    "e2m1": (6.0, 1.0, 0.5),
    "e1m2": (1.75, 1.0, 0.25),
    "e5m6": (65024.0, 2.0**-14, 2.0**-20),  # FP16 without its last four bits
}


def _bits_an_entry(scheme: Scheme) -> float:
    """Of the element, and its share of the scales of its block and outer block."""
    spec = scheme.spec
    assert spec is not None
    assert spec.block is not None
    of_scale = {"fp32": 32, "e8m0": 8}.get(spec.scale_format) or FORMATS[spec.scale_format].bits
    outer = 0.0 if spec.outer_block is None else 32 / math.prod(spec.outer_block)
    return FORMATS[spec.format].bits + of_scale / math.prod(spec.block) + outer


# Bits of an entry with its share of the scales; SNR in dB and slope <q, x> / <x, x> of standard normal numbers by an
# independent float64 simulation, before this.
BLOCK_FORMATS: dict[str, tuple[Scheme, float, float | None, float | None]] = {
    "MXFP8 E4M3, round_up": (Scheme(MXFP8), 8.25, 31.53, None),
    "MXFP6 E2M3, round_up": (Scheme(replace(MXFP8, format="e2m3")), 6.25, None, None),
    "MXFP6 E3M2, round_up": (Scheme(replace(MXFP8, format="e3m2")), 6.25, None, None),
    "MXFP4, floor": (Scheme(MXFP4), 4.25, 18.79, 0.9804),
    "MXFP4, round_up": (Scheme(QuantSpec("e2m1", "1x32", "e8m0", "round_up")), 4.25, 18.76, None),
    "MXFP4, SR": (Scheme(MXFP4_SR), 4.25, 15.50, 0.99997),
    **{
        name: (scheme, _bits_an_entry(scheme), None, 0.993 if name == "NVFP4, SR" else None)
        for name, scheme in FP4_SCHEMES.items()
    },
}


def run(lab: Lab) -> Result:
    """Grids beside the specifications' figures; SNR of normal numbers against their standard deviation; blocks."""
    count = 2**12 if lab.quick else 2**18
    x = lab.normal("formats", count)
    spread = [-0.5 * step for step in range(2 * BINADES)]
    lines = {name: (spread, [snr(x, fmt, log2) for log2 in spread]) for name, fmt in ELEMENT_FORMATS.items()}
    rows = [
        {**grid_row(fmt, lab), "best": max(lines[name][1]), **_span(lines[name])}
        for name, fmt in ELEMENT_FORMATS.items()
    ]
    columns = (
        Column("name", "format"),
        Column("values", "finite\nmagnitudes", "d"),
        Column("max", "largest", "g"),
        Column("normal", "smallest\nnormal", "g"),
        Column("smallest", "smallest", "g"),
        Column("published", "as in the\nspecification"),
        Column("binades", "log2 largest /\nsmallest", ".1f"),
        Column("worst", "largest relative\nerror, normal", ".4f"),
        Column("rms", "rms relative\nerror, normal", ".4f"),
        Column("best", "best SNR\ndB", ".1f"),
        Column("within", "binades within\n3 dB of it", ".1f"),
    )
    panel = Panel("round to nearest, saturating", "log2(standard deviation / largest number)", "SNR, dB", lines)
    notes = (
        "relative errors: numbers with log-uniform magnitudes between the smallest normal and the largest number",
        f"SNR: {count} normal numbers, one scale; the figure moves the standard deviation below the largest number",
    )
    tables = [Table("grids", "grids", columns, rows), block_table(lab, 8 if lab.quick else 256)]
    return Result("Number formats", notes, tables, {"": line_panels([panel])})


def block_table(lab: Lab, vectors: int) -> Table:
    """SNR and slope of vectors of standard normal numbers in block formats."""
    x = lab.normal("blocks", vectors, LENGTH).float()
    rows = []
    for name, (scheme, bits, snr_before, slope_before) in BLOCK_FORMATS.items():
        signal = transformed(lab, scheme, x).double()
        q = quantized_vectors(lab, scheme, x, "input").values().double()
        slope = float((q * signal).sum() / signal.square().sum())
        measured = {
            "snr": energy_snr(signal, q),
            "snr_before": snr_before,
            "slope": slope,
            "slope_before": slope_before,
        }
        rows.append({"name": name, "bits": bits, **measured})
    columns = (
        Column("name", "format"),
        Column("bits", "bits\nan entry", ".2f"),
        Column("snr", "SNR\ndB", ".2f"),
        Column("snr_before", "measured\nbefore, dB", ".2f"),
        Column("slope", "slope", ".4f"),
        Column("slope_before", "slope\nbefore", ".4f"),
    )
    return Table("blocks", f"block formats, {vectors} vectors of {LENGTH} standard normal numbers", columns, rows)


def grid_row(fmt: Format, lab: Lab) -> Row:
    """Extremes of the decoded codes, whether they are the published ones, and relative errors of normal numbers."""
    values = decode(torch.arange(1 << (fmt.bits - 1), dtype=torch.int32), fmt).double()
    finite = values[values.isfinite()]
    positive = finite[finite > 0]
    largest, smallest = float(positive.max()), float(positive.min())
    normal = 2.0**fmt.min_exponent
    span = torch.log2(torch.tensor(largest / normal, dtype=torch.float64))
    x = (normal * torch.exp2(span * lab.uniform("relative error", 2**16))).float()
    relative = ((round_to_format(x, fmt, "nearest_even").double() - x.double()) / x.double()).abs()
    return {
        "name": fmt.name,
        "values": finite.numel(),
        "max": largest,
        "normal": normal,
        "smallest": smallest,
        "published": "yes" if (largest, normal, smallest) == PUBLISHED[fmt.name] else "NO",
        "binades": float(torch.log2(torch.tensor(largest / smallest, dtype=torch.float64))),
        "worst": float(relative.max()),
        "rms": float(relative.square().mean().sqrt()),
    }


def snr(x: torch.Tensor, fmt: Format, log2_spread: float) -> float:
    """SNR in dB of standard normal numbers times 2^log2_spread times the largest number, rounded to nearest."""
    scaled = (x * 2.0**log2_spread * fmt.max).float()
    return energy_snr(scaled.double(), round_to_format(scaled, fmt, "nearest_even").double())


def _span(line: tuple[list[float], list[float]]) -> dict[str, float]:
    """Binades of the standard deviation in which the SNR is within 3 dB of the best."""
    best = max(line[1])
    return {"within": 0.5 * sum(value >= best - 3.0 for value in line[1])}
