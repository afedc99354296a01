"""Whether quantizers with draws are unbiased: the gain of the quantized values, and what is left of their mean error.

An operand is quantized with many draws of rounding and of a transform's signs, and transformed back. With q its values
and x the entries, the slope of a draw is <q, x> / <x, x>, 1 on average for an unbiased quantizer. The error that all
draws share, whose energy is |mean(q) - x|^2 - var / draws, is 0 for one that is unbiased in each entry. A mean over
seeds has data and draws of its own for each; z is its distance from the unbiased value in standard errors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from megatron_lowprec.conformance.reference_vectors import Operand, recipe_operands
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.lab.experiment import Lab, Result, Table
from megatron_lowprec.lab.fp4_schemes import FP4_SCHEMES
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.quant_spec import QuantSpec
from megatron_lowprec.recipe.schema import HadamardSpec
from megatron_lowprec.text_tables import Column

ROWS, COLUMNS = 16, 1024
SEEDS, DRAWS = 8, 16


def operands() -> dict[str, Operand]:
    """Quantizers with draws: those of recipes, by the first operand that has each, and the laboratory's others."""
    named = {users[0]: operand for operand, users in recipe_operands().items()}
    named |= {name: (scheme.spec, scheme.hadamard) for name, scheme in FP4_SCHEMES.items() if scheme.spec is not None}
    # one factor for each block of 16: what groups of several blocks cost
    named["MS-EDEN, groups of 16"] = named["MS-EDEN"][0], HadamardSpec(16)
    first: dict[Operand, str] = {}
    for name, (spec, hadamard) in named.items():
        if spec.random:
            # of one tensor, whose amax is its own
            first.setdefault((replace(spec.with_current_scaling(), history=1), hadamard), name)
    return {name: operand for operand, name in first.items()}


def run(lab: Lab) -> Result:
    """A row for each quantizer."""
    seeds, draws = (2, 4) if lab.quick else (SEEDS, DRAWS)
    rows = [{"name": name, **measure(lab, *operand, seeds, draws)} for name, operand in operands().items()]
    columns = (
        Column("name", "operand"),
        Column("snr", "SNR of one\ndraw, dB", ".2f"),
        Column("slope", "slope", ".5f"),
        Column("spread", "spread\nover seeds", ".5f"),
        Column("z", "z of\nslope - 1", "+.1f"),
        Column("shared", "shared error\nover variance, %", ".2f"),
        Column("shared_spread", "spread\nover seeds, %", ".2f"),
        Column("shared_z", "z of the\nshared error", "+.1f"),
    )
    notes = (
        f"{seeds} seeds of [{ROWS}, {COLUMNS}] standard normal entries, one tensor; {draws} draws each",
        "spread: standard deviation over seeds; z: mean over its standard error",
    )
    return Result("Unbiasedness of stochastic quantizers", notes, [Table("slopes", "slopes", columns, rows)], {})


def measure(lab: Lab, spec: QuantSpec, hadamard: HadamardSpec | None, seeds: int, draws: int) -> dict[str, Any]:
    """Mean and spread over seeds of slope and shared error, and their z; SNR of one draw in dB."""
    slopes, shared, errors = [], [], []
    for seed in range(seeds):
        x = lab.normal(f"unbiasedness {seed}", ROWS, COLUMNS).float()
        values = torch.stack(
            [_values(lab.at(seed * draws + draw), spec, hadamard, x) for draw in range(draws)]
        ).double()
        signal = x.double()
        slopes.append(float((values * signal).sum() / (draws * signal.square().sum())))
        variance = values.var(0).sum()
        shared.append(float(((values.mean(0) - signal).square().sum() - variance / draws) / variance))
        errors.append(float((values - signal).square().sum() / (draws * signal.square().sum())))
    slope, shared_error = torch.tensor(slopes, dtype=torch.float64), torch.tensor(shared, dtype=torch.float64)
    return {
        "snr": -10.0 * math.log10(sum(errors) / seeds),
        "slope": float(slope.mean()),
        "spread": float(slope.std()),
        "z": float((slope.mean() - 1.0) / slope.std() * seeds**0.5),
        "shared": 100.0 * float(shared_error.mean()),
        "shared_spread": 100.0 * float(shared_error.std()),
        "shared_z": float(shared_error.mean() / shared_error.std() * seeds**0.5),
    }


def _values(lab: Lab, spec: QuantSpec, hadamard: HadamardSpec | None, x: torch.Tensor) -> torch.Tensor:
    """fp32 [R, K] of one draw, behind the inverse of the transform, which is its transpose."""
    transform = None if hadamard is None else Transform(hadamard, lab.stream(""))
    matrix = x if transform is None else transform.apply(x)
    group = None if transform is None else transform.block
    data, scale, of_tensor = quantize_by_reference(matrix, spec, lab.stream("input"), group=group)
    made = QuantizedTensor(data.shape, data.dtype, spec, data, scale, rowwise_tensor_scale=of_tensor).dequantize()
    if transform is None:
        return made
    signs = transform.signs(x.device)
    return hadamard_transform(made, torch.ones_like(signs)) * signs.repeat(x.shape[1] // transform.block)
