"""Entries that OCP's floor rule clips in MXFP4: arXiv 2502.20586, section 3.1, puts them at about 3%."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from megatron_lowprec.lab.experiment import Lab, Result, Table
from megatron_lowprec.lab.lab_figures import Panel, line_panels
from megatron_lowprec.quantization.error_stats import QuantizationError, error_stats
from megatron_lowprec.quantization.quantizer import quantize
from megatron_lowprec.recipe.registry import MXFP4, MXFP8_OCP
from megatron_lowprec.recipe.schema import QuantSpec
from megatron_lowprec.text_tables import Column, Row

BLOCK = 32  # entries that share a scale
STEPS = 32  # standard deviations in a binade
PAPER = 3.0  # percent
CASES: dict[str, QuantSpec] = {
    "MXFP4, floor": MXFP4,
    "MXFP4, floor, times 3/4": replace(MXFP4, headroom=0.75),
    "MXFP4, round_up": QuantSpec("e2m1", "1x32", "e8m0", "round_up"),
    "MXFP8, floor": MXFP8_OCP,
}


def run(lab: Lab) -> Result:
    """Share of clipped entries over one binade of standard deviations; beyond it the shares repeat."""
    blocks = 64 if lab.quick else 2**13
    data = {
        "normal": lab.normal("clipping", blocks, BLOCK),
        "Laplace": laplace(lab.uniform("clipping", blocks, BLOCK)),
    }
    log2 = [step / STEPS for step in range(STEPS)]
    rows: list[Row] = []
    lines = {}
    for shape, x in data.items():
        for case, spec in CASES.items():
            shares = [100.0 * clipped(x * 2.0**each, spec) for each in log2]
            rows.append(
                {
                    "entries": shape,
                    "case": case,
                    "low": min(shares),
                    "high": max(shares),
                    "mean": sum(shares) / STEPS,
                    "paper": PAPER if case == "MXFP4, floor" else None,
                }
            )
            if max(shares) > 0:
                lines[f"{shape}, {case}"] = (log2, shares)
    columns = (
        Column("entries", "entries"),
        Column("case", "case"),
        Column("low", "least, %", ".2f"),
        Column("high", "most, %", ".2f"),
        Column("mean", "mean, %", ".2f"),
        Column("paper", "paper, about, %", ".0f"),
    )
    panel = Panel("entries beyond the largest value", "log2 of the standard deviation", "clipped, %", lines)
    notes = (f"{blocks} blocks of {BLOCK}; the standard deviation takes {STEPS} values over one binade",)
    tables = [Table("clipped", "clipped entries", columns, rows)]
    return Result("Clipped entries under the floor rule", notes, tables, {"": line_panels([panel])})


def clipped(x: torch.Tensor, spec: QuantSpec) -> float:
    """Share of the entries of x [blocks, 32] beyond the format's largest value under their scale."""
    operand = x.float()
    return QuantizationError.of(error_stats(operand, quantize(operand, spec)).tolist()).saturation


def laplace(uniform: torch.Tensor) -> torch.Tensor:
    """Laplace numbers of standard deviation 1 from uniform ones in [0, 1)."""
    centered = uniform - 0.5
    return -centered.sign() * torch.log1p(-2.0 * centered.abs()) / math.sqrt(2.0)
