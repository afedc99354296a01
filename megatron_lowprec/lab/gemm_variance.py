"""Variance of a product of two operands under Algorithm 2 of arXiv 2502.20586, with and without a Hadamard transform.

Figure 2 of the paper plots it against vector length and share of outliers; theorem 3.2 bounds it. The bound here is
explicit. A number of magnitude at most A, rounded stochastically under the floor rule with headroom 3/4, lies between
two grid values at most 2 * 4/3 * A / 4 apart, so its variance is at most (A / 3)^2. For independent rounding

    Var(q_a . q_b) <= K (A B / 9)^2 + (A / 3)^2 |b|^2 + (B / 3)^2 |a|^2

with A and B the largest magnitudes. After a transform in groups of g with random signs, an entry of a group with norm n
is sub-Gaussian, so with probability 1 - e all K of them are at most n sqrt(2 ln(2 K / e) / g).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron_lowprec.lab.dot_products import Scheme, dot, quantized_pair
from megatron_lowprec.lab.experiment import Lab, Result, Table
from megatron_lowprec.lab.fp4_schemes import FP4_SCHEMES
from megatron_lowprec.lab.lab_figures import Panel, line_panels
from megatron_lowprec.recipe.registry import MXFP4_SR
from megatron_lowprec.recipe.schema import HadamardSpec
from megatron_lowprec.text_tables import Column

LENGTHS = (64, 256, 1024, 4096)
OUTLIERS = (0.0, 0.01, 0.1)
SPREAD = 5.0  # standard deviation of an outlier
TRANSFORMS: dict[str, HadamardSpec | None] = {
    "no transform": None,
    "RHT 64": HadamardSpec(64),
    "RHT 256": HadamardSpec(256),
}
SIGN_DRAWS, ROUNDING_DRAWS, PAIRS = 8, 4, 64
FAILURE = 0.05  # e in the bound with a transform
# Transform: mean variance at length 4096 and a tenth of outliers, by an independent float64 simulation before this.
MEASURED_BEFORE = {"no transform": 5480.0, "RHT 64": 2960.0}


def run(lab: Lab) -> Result:
    """Mean variance over pairs of vectors, with its bound, by length, outliers and transform."""
    lengths, pairs = ((64, 256), 4) if lab.quick else (LENGTHS, PAIRS)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        for outliers in OUTLIERS:
            a, b = (with_outliers(lab, name, pairs, length, outliers) for name in "ab")
            rows += _rows(lab, a, b, {"operands": f"outliers {outliers}", "outliers": outliers})
        matched, inverse = mismatched(lab, pairs, length)
        rows += _rows(lab, matched, inverse, {"operands": "mismatched columns", "outliers": None})
    longest = lengths[-1]
    for row in rows:
        if row["length"] == LENGTHS[-1] and row["outliers"] == OUTLIERS[-1]:
            row["before"] = MEASURED_BEFORE.get(row["transform"])
    columns = (
        Column("operands", "operands"),
        Column("length", "length", "d"),
        Column("transform", "transform"),
        Column("variance", "variance", ".4g"),
        Column("error", "standard error\nover pairs", ".2g"),
        Column("over", "over no\ntransform", ".3f"),
        Column("snr", "SNR\ndB", ".2f"),
        Column("bias", "mean error over\nits standard error", "+.2f"),
        Column("bound", "bound", ".4g"),
        Column("before", "measured\nbefore", ".0f"),
    )
    notes = (
        f"entries N(0, 1), a share of them plus N(0, {SPREAD:g}^2); {pairs} pairs of vectors, {SIGN_DRAWS} draws of "
        f"signs with {ROUNDING_DRAWS} draws of rounding each",
        "mismatched columns: a times c and b over c, log2 c normal with standard deviation 2",
        f"bound with a transform: holds for all entries of a vector with probability {1 - FAILURE}",
    )
    panels = [
        Panel(
            f"outliers {outliers}",
            "length",
            "variance",
            {
                name: ([row["length"] for row in found], [row[key] for row in found])
                for transform in TRANSFORMS
                for key, name in (("variance", transform), ("bound", f"bound, {transform}"))
                if (found := [r for r in rows if r["transform"] == transform and r["outliers"] == outliers])
            },
            log_x=2,
            log_y=True,
        )
        for outliers in OUTLIERS
    ]
    tables = [
        Table("longest", f"length {longest}", columns, [row for row in rows if row["length"] == longest]),
        Table("lengths", "all lengths", columns, rows),
        scheme_table(lab, pairs, longest),
    ]
    return Result("Variance of MXFP4 products", notes, tables, {"": line_panels(panels)})


def with_outliers(lab: Lab, name: str, count: int, length: int, share: float) -> torch.Tensor:
    """fp32 [count, length]: normal numbers, to a share of which others of standard deviation ``SPREAD`` are added."""
    chosen = lab.uniform(f"chosen {name} {length}", count, length) < share
    outliers = SPREAD * lab.normal(f"outliers {name} {length}", count, length)
    return (lab.normal(f"body {name} {length}", count, length) + chosen * outliers).float()


def mismatched(lab: Lab, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 [count, length] whose columns have reciprocal scales."""
    scale = torch.exp2(2.0 * lab.normal(f"columns {length}", 1, length))
    a, b = (lab.normal(f"body {name} {length}", count, length) for name in "ab")
    return (a * scale).float(), (b / scale).float()


def product_draws(
    lab: Lab, a: torch.Tensor, b: torch.Tensor, scheme: Scheme, signs: int, roundings: int
) -> torch.Tensor:
    """float64 [signs * roundings, N] draws of the products of a and b [N, K]."""
    draws = []
    for draw in range(signs):
        products = dot(*quantized_pair(lab.at(draw), scheme, a.repeat(roundings, 1), b.repeat(roundings, 1)))
        draws.append(products.reshape(roundings, len(a)))
    return torch.cat(draws)


def bound(a: torch.Tensor, b: torch.Tensor, hadamard: HadamardSpec | None) -> torch.Tensor:
    """float64 [N]: the module's bound of each product's variance."""
    a, b = a.double(), b.double()
    largest_a, largest_b = (_largest(x, hadamard) for x in (a, b))
    return (
        a.shape[1] * (largest_a * largest_b / 9.0).square()
        + (largest_a / 3.0).square() * b.square().sum(1)
        + (largest_b / 3.0).square() * a.square().sum(1)
    )


def _largest(x: torch.Tensor, hadamard: HadamardSpec | None) -> torch.Tensor:
    if hadamard is None:
        return x.abs().amax(1)
    norms = x.reshape(len(x), -1, hadamard.block).norm(dim=2)
    return norms.amax(1) * math.sqrt(2.0 * math.log(2.0 * x.shape[1] / FAILURE) / hadamard.block)


def scheme_table(lab: Lab, pairs: int, length: int) -> Table:
    """FP4 formats of recipes: mean squared error of products, which is the variance where rounding is unbiased."""
    rows = []
    for outliers in (OUTLIERS[0], OUTLIERS[-1]):
        a, b = (with_outliers(lab, name, pairs, length, outliers) for name in "ab")
        for name, scheme in {"MXFP4, SR": Scheme(MXFP4_SR), **FP4_SCHEMES}.items():
            rows.append({"outliers": outliers, "name": name, **_errors(lab, a, b, scheme)})
    columns = (
        Column("outliers", "share of\noutliers", "g"),
        Column("name", "format"),
        Column("variance", "mean squared\nerror", ".4g"),
        Column("error", "standard error\nover pairs", ".2g"),
        Column("snr", "SNR\ndB", ".2f"),
    )
    return Table("schemes", f"formats of recipes, length {length}", columns, rows)


def _errors(lab: Lab, a: torch.Tensor, b: torch.Tensor, scheme: Scheme) -> dict[str, float]:
    """Mean square of the products' errors over pairs and draws, its standard error, SNR, and z of the mean error."""
    signal = (a.double() * b.double()).sum(1)
    errors = product_draws(lab, a, b, scheme, SIGN_DRAWS, ROUNDING_DRAWS) - signal
    of_pairs = errors.square().mean(0)
    return {
        "variance": float(of_pairs.mean()),
        "error": float(of_pairs.std() / math.sqrt(len(a))),
        "snr": 10.0 * math.log10(float(signal.square().mean() / of_pairs.mean())),
        "bias": float(errors.mean() / (errors.std() / math.sqrt(errors.numel()))),
    }


def _rows(lab: Lab, a: torch.Tensor, b: torch.Tensor, case: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first = 0.0
    for name, hadamard in TRANSFORMS.items():
        if hadamard is not None and a.shape[1] % hadamard.block:
            continue
        found = _errors(lab, a, b, Scheme(MXFP4_SR, hadamard=hadamard))
        first = first or found["variance"]
        rows.append(
            {
                **case,
                "length": a.shape[1],
                "transform": name,
                **found,
                "over": found["variance"] / first,
                "bound": float(bound(a, b, hadamard).mean()),
                "before": None,
            }
        )
    return rows
