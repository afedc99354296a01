"""E8M0 scale rules: OCP's floor against rounding up (arXiv 2506.08027), and torchao's two others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron_lowprec.lab.dot_products import Scheme, correlated_vectors, dot, energy_snr, quantized_pair
from megatron_lowprec.lab.experiment import Lab, Result, Table
from megatron_lowprec.lab.lab_figures import Panel, line_panels
from megatron_lowprec.quantization.error_stats import QuantizationError, error_stats
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.recipe.registry import MXFP4, MXFP8, MXFP8_E5M2
from megatron_lowprec.recipe.schema import QuantSpec
from megatron_lowprec.scaling import scale_rules
from megatron_lowprec.text_tables import Column, Row

SPECS = {"e4m3": MXFP8, "e5m2": MXFP8_E5M2, "e2m1": MXFP4}
CORRELATIONS = (0.0, 0.5, 0.9)
BINS = 16
BLOCK = 32  # entries that share a scale
# (format, rule): SNR in dB of standard normal numbers, measured before by an independent float64 simulation.
MEASURED_BEFORE = {
    ("e4m3", "floor"): 30.65,
    ("e4m3", "round_up"): 31.53,
    ("e2m1", "floor"): 18.79,
    ("e2m1", "round_up"): 18.76,
}


class Operand(NamedTuple):
    """Blocks of normal numbers, fp32 [blocks, 32]."""

    x: torch.Tensor

    @property
    def position(self) -> torch.Tensor:
        """log2 of each block's largest magnitude, fraction only."""
        log2 = self.x.abs().amax(1).double().log2()
        return log2 - log2.floor()


def run(lab: Lab) -> Result:
    """SNR, gain error and saturation of each rule; SNR of products; SNR against the place of the largest magnitude."""
    blocks, products, length = (256, 16, 512) if lab.quick else (2**15, 1024, 4096)
    operand, standard = operand_of(lab, blocks), Operand(lab.normal("blocks", blocks, BLOCK).float())
    rows: list[dict[str, Any]] = []
    panels = []
    for name, base in SPECS.items():
        lines = {}
        for rule in scale_rules("e8m0"):
            spec = replace(base, scale=replace(base.scale, rule=rule))
            found = {**tensor_row(operand, spec), **_products(lab, spec, products, length)}
            rows.append({"format": name, "rule": rule, **found, "before": MEASURED_BEFORE.get((name, rule))})
            rows[-1]["standard"] = tensor_row(standard, spec)["snr"]
            lines[rule] = by_position(operand, spec)
        x = "log2 of the block's largest magnitude, above the power of two below it"
        panels.append(Panel(f"{name}, blocks of {BLOCK}", x, "SNR, dB", lines))
    columns = (
        *(Column(key, key) for key in ("format", "rule")),
        Column("snr", "SNR\ndB", ".2f"),
        Column("standard", "SNR, dB\nsd 1", ".2f"),
        Column("before", "sd 1, measured\nbefore, dB", ".2f"),
        Column("gain", "gain error", "+.5f"),
        Column("saturation", "share\nsaturated", ".4f"),
        Column("blocks", "share of blocks\nthat saturate", ".4f"),
        *(Column(f"{each}", f"product SNR, dB\ncorrelation {each}", ".2f") for each in CORRELATIONS),
    )
    notes = (
        f"{blocks} blocks of {BLOCK} normal numbers, standard deviation log-uniform over a binade, nearest even",
        f"product SNR: energy over {products} products of length {length}, both operands by the rule",
        "gain error: <q, x> / <x, x> - 1",
    )
    return Result(
        "Scale rules of MX formats", notes, [Table("rules", "rules", columns, rows)], {"": line_panels(panels)}
    )


def operand_of(lab: Lab, blocks: int) -> Operand:
    """Blocks whose standard deviations are log-uniform over one binade."""
    sd = torch.exp2(lab.uniform("scale of blocks", blocks, 1))
    return Operand((sd * lab.normal("blocks", blocks, BLOCK)).float())


def tensor_row(operand: Operand, spec: QuantSpec) -> Row:
    """SNR, gain error, share of saturated entries and of blocks that have one."""
    quantized = quantize(operand.x, spec)
    error = QuantizationError.of(error_stats(operand.x, quantized).tolist())
    limit = quantized.format.max * quantized.decode_scale
    return {
        "snr": error.snr,
        "gain": error.bias,
        "saturation": error.saturation,
        "blocks": float((operand.x.abs().amax(1, keepdim=True) > limit).double().mean()),
    }


def by_position(operand: Operand, spec: QuantSpec) -> tuple[Sequence[float], Sequence[float]]:
    """Middle of each bin of ``Operand.position``, and the SNR in dB of its blocks; NaN without blocks."""
    x, q = operand.x.double(), quantize(operand.x, spec).dequantize().double()
    of_block = (operand.position * BINS).long().clamp(max=BINS - 1)
    found = [of_block == each for each in range(BINS)]
    snr = [energy_snr(x[blocks], q[blocks]) if bool(blocks.any()) else math.nan for blocks in found]
    return [(each + 0.5) / BINS for each in range(BINS)], snr


def _products(lab: Lab, spec: QuantSpec, count: int, length: int) -> dict[str, float]:
    """correlation -> energy SNR in dB of ``count`` products."""
    found = {}
    for correlation in CORRELATIONS:
        a, b = correlated_vectors(lab, count, length, correlation, 1.0)
        products = dot(*quantized_pair(lab, Scheme(spec), a, b))
        found[f"{correlation}"] = energy_snr((a.double() * b.double()).sum(1), products)
    return found
