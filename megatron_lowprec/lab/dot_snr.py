"""SNR of dot products against length, correlation, quantization and accumulator.

Settings are those of a study of FP8 (github.com/reiase/ieee754_simulation): normal entries of standard deviation 0.01,
200 products. The study draws the SNR of each product; the energy SNR beside it is the ratio of the sums over all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_lowprec.kernels.gemm.fp8_accumulator import Fp8Accumulator
from megatron_lowprec.lab.dot_products import (
    Accumulator,
    Scheme,
    correlated_vectors,
    dot,
    energy_snr,
    expected_snr,
    quantized_pair,
    sample_snr,
    snr_row,
)
from megatron_lowprec.lab.experiment import Lab, Result, Table, pivot
from megatron_lowprec.lab.fp4_schemes import FP4_SCHEMES
from megatron_lowprec.lab.lab_figures import Panel, histograms, line_panels
from megatron_lowprec.recipe.registry import FP8_CURRENT, MXFP4, MXFP4_SR, MXFP8, MXFP8_OCP
from megatron_lowprec.recipe.schema import HadamardSpec, QuantSpec
from megatron_lowprec.text_tables import Column, Row

SD, REPEATS, MANY = 0.01, 200, 2048
LENGTHS = tuple(2**n for n in range(7, 15))
CORRELATIONS = (0.0, 0.2, 0.5, 0.9, 0.99)
LENGTH = 4096  # of tables against correlation
PROMOTIONS = (32, 64, 128, 512, None)

TENSOR, BLOCKS = "E4M3, scale a vector", "E4M3, blocks of 128"
SCHEMES = {
    "E4M3, no scale": Scheme(FP8_CURRENT, encode_scale=1.0),
    "E4M3, scale 64": Scheme(FP8_CURRENT, encode_scale=64.0),
    TENSOR: Scheme(QuantSpec("e4m3", granularity="row")),  # a vector is a tensor here
    "E4M3, blocks of 512": Scheme(QuantSpec("e4m3", granularity="1x512")),
    BLOCKS: Scheme(QuantSpec("e4m3", granularity="1x128")),
    "E4M3, blocks of 32": Scheme(QuantSpec("e4m3", granularity="1x32")),
    "MXFP8, floor": Scheme(MXFP8_OCP),
    "MXFP8, round_up": Scheme(MXFP8),
    "MXFP4": Scheme(MXFP4),
    "MXFP4, RHT": Scheme(MXFP4, hadamard=HadamardSpec()),
    "MXFP4, SR": Scheme(MXFP4_SR),
    "MXFP4, RHT and SR": Scheme(MXFP4_SR, hadamard=HadamardSpec()),
    **FP4_SCHEMES,
}
ACCUMULATORS: dict[str, dict[str, Accumulator | Fp8Accumulator]] = {
    TENSOR: {
        **{f"14 bits rounded, {promote or 'never'}": Accumulator(14, promote) for promote in PROMOTIONS},
        **{f"Hopper, {promote or 'never'}": Fp8Accumulator(promote=promote) for promote in PROMOTIONS},
    },
    BLOCKS: {"blocks of 128, Hopper, 128": Fp8Accumulator(promote=128)},
}
# Scheme -> energy SNR in dB at correlation 0, 0.5 and 0.9, length 4096, standard normal vectors: an independent
# float64 simulation, before this.
MEASURED_BEFORE = {
    "E4M3, scale a vector": (27.99, 53.77, 55.23),
    "E4M3, blocks of 128": (28.89, 54.90, 56.75),
    "MXFP8, floor": (27.61, 44.92, 45.12),
    "MXFP8, round_up": (28.09, 53.97, 55.44),
    "MXFP4": (15.18, 28.08, 28.35),
    "MXFP4, SR": (11.99, 40.90, 44.55),
    "MXFP4, RHT and SR": (12.41, 41.39, 43.87),
    "NVFP4": (16.96, 39.72, 40.55),
}
STATISTICS = {
    "energy": "energy SNR in dB",
    "error": "rms error of a product",
    "below": "share of products below 0 dB",
    "low": "5th percentile of the products' SNR in dB",
    "median": "median of the products' SNR in dB",
    "high": "95th percentile of the products' SNR in dB",
}
CHECKED = (0.0, 0.5, 0.9)
DRAWN = (TENSOR, BLOCKS, "MXFP8, floor", "MXFP8, round_up", "NVFP4", "MXFP4", "MXFP4, SR", "MXFP4, RHT and SR")
DRAWN_ACCUMULATORS = (
    *(TENSOR, "14 bits rounded, never", "14 bits rounded, 128"),
    *("Hopper, never", "Hopper, 512", "Hopper, 128", "Hopper, 32"),
)


def run(lab: Lab) -> Result:
    """Tables at every length and correlation, histograms of the study's cases, and a comparison with many products."""
    lengths, length = ((128, 512), 512) if lab.quick else (LENGTHS, LENGTH)
    rows: list[Row] = []
    samples: dict[tuple[str, int, float], torch.Tensor] = {}
    for each in lengths:
        found, of_length = measure(lab, each, REPEATS // 10 if lab.quick else REPEATS)
        rows += found
        samples |= of_length
    notes = (
        f"entries N(0, {SD}^2), {REPEATS} products a case; products of fp32 vectors in float64 are the reference",
        "energy: 10 log10(sum signal^2 / sum error^2) over the products",
        "low, median, high: percentiles 5, 50 and 95 of the products' own SNR; below: share of products below 0 dB",
        f"accumulators sum the products of '{TENSOR}': rounded to 14 bits after each addition, or as Hopper's tensor",
        "cores; the number is the length of a partial sum, which is added in float64. All other rows sum exactly.",
    )
    tables = [
        *(pivot(rows, key, title, {"length": length}, "correlation") for key, title in STATISTICS.items()),
        *(pivot(rows, key, STATISTICS[key], {"correlation": 0.0}, "length") for key in ("energy", "below", "error")),
        *(pivot(rows, key, STATISTICS[key], {"correlation": 0.9}, "length") for key in ("energy", "error")),
        compare(lab, 64 if lab.quick else MANY, length),
    ]
    figures = {
        "": _curves(rows, length, DRAWN),
        "-accumulators": _curves(rows, length, DRAWN_ACCUMULATORS),
        "-histograms": histograms(samples, lengths, length),
    }
    return Result("SNR of dot products", notes, tables, figures, rows)


def measure(lab: Lab, length: int, repeats: int) -> tuple[list[Row], dict[tuple[str, int, float], torch.Tensor]]:
    """A row for each scheme, accumulator and correlation at one length; (name, length, correlation) -> samples' SNR."""
    pairs = [correlated_vectors(lab, repeats, length, correlation, SD) for correlation in CORRELATIONS]
    a, b = (torch.cat([pair[at] for pair in pairs]) for at in (0, 1))
    signals = (a.double() * b.double()).sum(1).split(repeats)
    rows: list[Row] = []
    samples = {}
    for name, results in _results(lab, a, b):
        for correlation, signal, result in zip(CORRELATIONS, signals, results.split(repeats)):
            case = {"name": name, "length": length, "correlation": correlation}
            rows.append({**case, **snr_row(signal, result)})
            samples[name, length, correlation] = sample_snr(signal, result).cpu()
    return rows, samples


def compare(lab: Lab, count: int, length: int) -> Table:
    """Energy SNR over many products of standard normal vectors, beside the figures measured before."""
    rows: list[dict[str, Any]] = [{"name": name} for name in MEASURED_BEFORE]
    for at, correlation in enumerate(CHECKED):
        a, b = correlated_vectors(lab, count, length, correlation, sd=1.0)
        signal = (a.double() * b.double()).sum(1)
        for row in rows:
            scheme = SCHEMES[row["name"]]
            pair = quantized_pair(lab, scheme, a, b)
            row[f"{correlation}"] = energy_snr(signal, dot(*pair))
            row[f"before-{correlation}"] = MEASURED_BEFORE[row["name"]][at]
            if correlation == 0.0 and scheme.hadamard is None:
                row["expected"] = expected_snr(pair, a, b)
    columns = [Column("expected", "expected 0.0", ".2f")]
    for each in CHECKED:
        columns += [Column(f"{each}", f"{each}", ".2f"), Column(f"before-{each}", f"before {each}", ".2f")]
    title = f"energy SNR in dB by correlation, {count} products of standard normal vectors of length {length}"
    return Table("compared", title, (Column("name", "scheme"), *columns), rows)


def _results(lab: Lab, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for name, scheme in SCHEMES.items():
        pair = quantized_pair(lab, scheme, a, b)
        yield name, dot(*pair)
        for accumulated, accumulator in ACCUMULATORS.get(name, {}).items():
            yield accumulated, dot(*pair, accumulator)


def _curves(rows: Sequence[Row], length: int, names: Sequence[str]) -> bytes:
    """PNG: energy SNR against length at correlation 0 and 0.9, and against correlation at one length."""
    panels = []
    for across, key, fixed in (
        ("length", "correlation", 0.0),
        ("length", "correlation", 0.9),
        ("correlation", "length", length),
    ):
        lines = {}
        for name in names:
            found = [row for row in rows if row["name"] == name and row[key] == fixed]
            lines[name] = [row[across] for row in found], [row["energy"] for row in found]
        log = 2 if across == "length" else None
        panels.append(Panel(f"{key} {fixed}", across, "energy SNR, dB", lines, log_x=log))
    return line_panels(panels, reference=TENSOR)
