"""Self-test before the first step: unbiased rounding on this device, and GEMMs that match the reference.

A broken random number generator does not stop training: stochastic rounding then rounds everything to zero, or always
in the same direction, while the loss still decreases for a while. The test runs the code path of training: a layer's
forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.linear.lowprec_linear import LowPrecLinear, end_step
from megatron_lowprec.recipe.recipe import KeepBf16, Recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, HadamardSpec, QuantSpec

_DRAWS = 16
# The mean of unbiased draws is one standard error from the truth; over 128 x 128 values within a few percent.
_STANDARD_ERRORS = 1.1
# The mean's component along the operand, of which the signs of a transform hide a bias from the error; unbiased draws
# are within 0.0018, `quartet2` without its correction is 0.008 below 1.
_GAIN = 2.0**-8
# Two devices sum in different orders, and each rounds its result to bf16.
_SAME = 2.0**-7
_ADVICE = "training would go wrong: check driver, torch and triton (--no-self-test goes on without this test)"


def self_test(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
    """Check ``recipe`` on ``device``; raises a UserError that names the failing GEMM and operand.

    Stochastic rounding of elements or scales, for each operand: the mean of several draws has the error of unbiased
    draws, and no other length. GEMMs: the result is as close to the exact product as the formats allow and, on a GPU,
    equals the CPU reference.
    """
    # Layers draw their weights, and the test must not change a run's random state.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for gemm, operand, spec, hadamard in _random_operands(recipe):
            _check_unbiased(gemm, operand, spec, hadamard, dtype, device)
        for linear in recipe.linear_recipes:
            if linear.quantized:
                plain = replace(recipe, keep_bf16=KeepBf16(), rules=(), phases=())
                _check_products(replace(plain, **linear.gemms), dtype, device)  # type: ignore[arg-type]


def _random_operands(recipe: Recipe) -> Iterator[tuple[str, str, QuantSpec, HadamardSpec | None]]:
    """Operands that are unbiased by their draws; a correction is over random signs, with the transform that has them.

    Scales that are drawn for elements rounded to nearest are biased without a correction.
    """
    for gemm, found in dict.fromkeys(recipe.specs()):
        random_signs = found.hadamard is not None and found.hadamard.signs == "random"
        for operand in GEMM_OPERANDS[gemm]:
            spec: QuantSpec | None = getattr(found, operand)
            if spec is None:
                continue
            if spec.correction is not None and random_signs:
                yield gemm, operand, spec, found.hadamard
            elif spec.rounding == "stochastic":
                yield gemm, operand, replace(spec, correction=None), None


def _check_unbiased(
    gemm: str, operand: str, spec: QuantSpec, hadamard: HadamardSpec | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Draw one operand several times, by a GEMM with the identity."""
    plain = replace(spec.with_current_scaling(), source="original")
    quantized: dict[str, Any] = {operand: plain}
    alone: dict[str, Any] = {gemm: GemmSpec(**quantized, hadamard=hadamard)}
    size = math.lcm(128, *(spec.block or ()), 1 if hadamard is None else hadamard.block)
    layer = LowPrecLinear(
        size, size, bias=False, device=device, dtype=dtype, recipe=Recipe("self-test", "one operand", **alone)
    )
    matrix = _without_saturation(spec, size).to(device, dtype)
    draws = torch.stack([_times_identity(layer, gemm, operand, matrix, draw) for draw in range(_DRAWS)])
    exact, mean, spread = matrix.float(), draws.mean(dim=0), float(draws.var(dim=0).mean().sqrt())
    error = float((mean - exact).square().mean().sqrt())
    found = error * math.sqrt(_DRAWS) / spread if spread else math.inf
    # A probability in few bits is itself rounded: by 2^-bits / sqrt(12) on average; one draw varies by 0.35.
    allowed = math.sqrt(_STANDARD_ERRORS**2 + 1.4 * _DRAWS / 4**spec.random_bits)
    biased = (
        f"self-test on {device}: {gemm}'s {operand} ({spec.format.upper()}) is not rounded without bias: the mean of "
        f"{_DRAWS} draws is"
    )
    if not found < allowed:
        raise UserError(f"{biased} {found:.2f} standard errors off, at most {allowed:.2f} expected; {_ADVICE}")
    gain = float((mean * exact).sum() / exact.square().sum())
    bound = _GAIN + 2.0 ** -(4 + spec.random_bits)  # one bit gives 0.025
    if not abs(gain - 1) < bound:
        raise UserError(f"{biased} {gain:.4f} times the operand, within {bound:.4f} of 1 expected; {_ADVICE}")


def _without_saturation(spec: QuantSpec, size: int) -> torch.Tensor:
    """fp32 [size, size]: values over the whole range of the format, with the largest in every block."""
    largest = FORMATS[spec.format].max
    generator = torch.Generator().manual_seed(0)
    matrix = (2.0 * torch.rand(size, size, generator=generator) - 1.0) * largest
    matrix[:, :: min(8, spec.block[1] if spec.block else 8)] = largest
    # Off by a power of two, so that the scale is not 1.
    return matrix * 2.0**-10


def _times_identity(layer: LowPrecLinear, gemm: str, operand: str, matrix: torch.Tensor, draw: int) -> torch.Tensor:
    """The result of the GEMM of fp32 ``matrix`` [rows, contracted] with the identity."""
    torch.default_generator.manual_seed(draw)
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    # dgrad contracts output features, wgrad tokens: first dimensions of a layer's tensors.
    turned = (gemm, operand) in (("dgrad", "weight"), ("wgrad", "grad_output"), ("wgrad", "input"))
    given = matrix.t() if turned else matrix
    operands = dict.fromkeys(("input", "weight", "grad_output"), identity) | {operand: given.contiguous()}
    product = _products(layer, operands)[gemm].float()
    # As a GEMM's second operand the matrix comes out transposed.
    return product.t() if operand == GEMM_OPERANDS[gemm][1] else product


def _products(layer: LowPrecLinear, operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """y, dx and dw of a layer for x_TI, w_OI and dy_TO."""
    x = operands["input"].clone().requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(operands["weight"])
    y = layer(x)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), operands["grad_output"])
    return {"fprop": y.detach(), "dgrad": dx, "wgrad": dw}


def _check_products(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
    blocks = (size for gemm in GEMM_OPERANDS for spec in _specs(recipe, gemm) for size in spec.block or ())
    size = math.lcm(256, *blocks)  # 256: the largest Hadamard transform
    generator = torch.Generator().manual_seed(0)
    operands = {
        name: torch.randn(size, size, generator=generator).to(dtype) for name in ("input", "weight", "grad_output")
    }
    x, w, dy = (operands[name].double() for name in ("input", "weight", "grad_output"))
    exact = {"fprop": x @ w.t(), "dgrad": dy @ w, "wgrad": dy.t() @ x}
    found = _on(device, recipe, operands)
    reference = found if device.type == "cpu" else _on(torch.device("cpu"), recipe, operands)
    for gemm in GEMM_OPERANDS:
        error = _distance(found[gemm], exact[gemm])
        # The formats' relative spacing; an all-zero product has distance 1.
        bits = [FORMATS[spec.format].mantissa_bits for spec in _specs(recipe, gemm)]
        allowed = math.sqrt(sum(4.0**-b for b in bits)) + _SAME
        if not error < allowed:
            raise UserError(
                f"self-test on {device}: {gemm} is {error:.2g} away from the exact product, relative to it, at most "
                f"{allowed:.2g} expected; {_ADVICE}"
            )
        difference = _distance(found[gemm], reference[gemm].double())
        if not difference < _SAME:
            raise UserError(
                f"self-test on {device}: {gemm} differs from the reference's product by {difference:.2g}, relative to "
                f"it, at most {_SAME:.2g} expected; {_ADVICE}"
            )


def _specs(recipe: Recipe, gemm: str) -> list[QuantSpec]:
    specs: list[QuantSpec | None] = [getattr(getattr(recipe, gemm), operand) for operand in GEMM_OPERANDS[gemm]]
    return [spec for spec in specs if spec is not None]


def _on(device: torch.device, recipe: Recipe, operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    size, dtype = len(operands["input"]), operands["input"].dtype
    layer = LowPrecLinear(size, size, bias=False, device=device, dtype=dtype, recipe=recipe)
    here = {name: tensor.to(device) for name, tensor in operands.items()}
    if recipe.delayed_operands():
        # One step, from which delayed scaling takes its scales.
        _products(layer, here)
        end_step(layer)
    torch.default_generator.manual_seed(0)  # the same draws on every device
    return {gemm: product.cpu() for gemm, product in _products(layer, here).items()}


def _distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())
