"""The arithmetic that github.com/reiase/ieee754_simulation really runs (simfloat_fp8_e4m3_v2.ipynb), and controls.

That notebook measures a fixed scale of 64 with products and sums in E4M3, and blocks with sums of 9 significand bits.
Its vectors of "length 4096" have 1024 entries, and its blocks "none" are blocks of 128. The controls change one thing
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.quantize.reference import round_to_format
from megatron_lowprec.lab.dot_products import (
    Accumulator,
    ScaledVectors,
    Scheme,
    dot,
    quantized_pair,
    running_sum,
    snr_row,
)
from megatron_lowprec.lab.dot_snr import REPEATS, SD, STATISTICS
from megatron_lowprec.lab.experiment import Lab, Result, pivot
from megatron_lowprec.lab.lab_figures import grouped_bars
from megatron_lowprec.recipe.registry import FP8_CURRENT
from megatron_lowprec.recipe.schema import QuantSpec
from megatron_lowprec.text_tables import Row

LENGTHS = (128, 1024, 4096)
MIXES = (0.0, 0.01, 0.1, 0.2)
BITS_OF_BLOCKS = 9  # define_context(8, 8) has eight fraction bits
SHOWN = {key: STATISTICS[key] for key in ("below", "median", "high")}


def run(lab: Lab) -> Result:
    """Tables of the notebook's cases and of the controls, by length and by mix."""
    lengths, repeats = ((128,), 20) if lab.quick else (LENGTHS, REPEATS)
    rows: list[Row] = []
    for length in lengths:
        for mix in MIXES:
            a, b = mixed_vectors(lab, repeats, length, mix)
            signal = (a.double() * b.double()).sum(1)
            for name, result in cases(lab, a, b):
                rows.append({"name": name, "length": length, "mix": mix, **snr_row(signal, result)})
    tables = [
        pivot(rows, key, title, {"mix": mix}, "length") for key, title in SHOWN.items() for mix in (MIXES[0], MIXES[-1])
    ]
    tables += [
        pivot(rows, key, title, {"length": length}, "mix") for key, title in SHOWN.items() for length in lengths[-2:]
    ]
    notes = (
        f"entries N(0, {SD}^2), {repeats} products a case",
        "sums in E4M3: terms and running sums are rounded to E4M3, half away from zero",
        "[notebook]: as published; other rows are controls that change one thing",
        "the second vector is mix * a + (1 - mix) * z; SNR: 10 log10(signal^2 / error^2) of one product",
    )
    shown = [row for row in rows if row["length"] == lengths[-1]]
    figure = grouped_bars(
        [
            (f"mix {mix}", {row["name"]: row["median"] for row in shown if row["mix"] == mix})
            for mix in (MIXES[0], MIXES[-1])
        ],
        "median SNR of a product, dB",
    )
    return Result("A study's own arithmetic, and controls", notes, tables, {"": figure}, rows)


def mixed_vectors(lab: Lab, count: int, length: int, mix: float) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [count, length]: a, and mix * a + (1 - mix) * z, whose correlation is above ``mix`` if mix < 1/2."""
    a, z = (SD * lab.normal(f"mixed {name} {length}", count, length) for name in "az")
    return a.float(), (mix * a + (1.0 - mix) * z).float()


def cases(lab: Lab, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and float64 [N] products of each case."""
    unscaled, fixed, double = (quantized_pair(lab, Scheme(FP8_CURRENT, scale), a, b) for scale in (1.0, 64.0, 128.0))
    for scale, operands in ((1, unscaled), (64, fixed), (128, double)):
        yield f"scale {scale}, sums in E4M3 [notebook]", e4m3_dot(*operands, None)
    for promote in (512, 128):
        yield f"scale 64, sums in E4M3 to {promote} [notebook]", e4m3_dot(*fixed, promote)
    for promotion in (None, 512, 128):
        name = f"scale 64, sums of {BITS_OF_BLOCKS} bits{f' to {promotion}' if promotion else ''}"
        yield name, dot(*fixed, Accumulator(BITS_OF_BLOCKS, promote=promotion))
    yield "scale 64, exact sums", dot(*fixed)
    yield "scale 1, exact sums", dot(*unscaled)
    for block in (512, 128, 64):
        if block <= a.shape[1]:
            scheme = Scheme(QuantSpec("e4m3", granularity=f"1x{block}"))
            of_blocks = quantized_pair(lab, scheme, a, b)
            narrow = Accumulator(BITS_OF_BLOCKS, promote=block)
            yield f"blocks of {block}, sums of {BITS_OF_BLOCKS} bits [notebook]", dot(*of_blocks, narrow)
            yield f"blocks of {block}, exact sums", dot(*of_blocks)


def e4m3_dot(a: ScaledVectors, b: ScaledVectors, promote: int | None) -> torch.Tensor:
    """float64 [N] products whose terms and running sums are rounded to E4M3, half away from zero."""
    rounding = partial(round_to_format, fmt=FORMATS["e4m3"], rounding="half_away")
    count, length = a.elements.shape
    terms = rounding(a.elements * b.elements).reshape(-1, min(promote or length, length))
    sums = running_sum(terms, rounding).double().reshape(count, -1).sum(1)
    return sums * (a.scale.double() * b.scale.double())[:, 0]
