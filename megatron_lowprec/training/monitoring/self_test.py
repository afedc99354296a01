"""Before the first step: does this device round without bias, and multiply as the reference does?

A broken generator of random numbers does not stop a training: stochastic rounding then rounds everything to zero, or
always the same way, and the loss goes on falling for a while. What is tested is the way that training takes: a layer's
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
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, KeepBf16, QuantSpec, Recipe

_DRAWS = 16
# The mean of unbiased draws lies a standard error from the truth; over 128 x 128 values that is sure to a few percent.
_STANDARD_ERRORS = 1.1
# Two devices sum in different orders, and each rounds what it returns to bf16.
_SAME = 2.0**-7
_ADVICE = "training would go wrong: check driver, torch and triton (--no-self-test goes on without this test)"


def self_test(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
    """Raise a UserError that names GEMM and operand if ``recipe`` does not do on ``device`` what it says.

    Stochastic rounding, operand by operand: the mean of several draws lies where that of unbiased ones would. The
    products: near the exact ones, as near as the formats allow; and on a GPU, those of the reference on the CPU.
    """
    # Layers draw their weights, and a run must not depend on whether it was tested.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for gemm, operand, spec in _stochastic_operands(recipe):
            _check_unbiased(gemm, operand, spec, dtype, device)
        if recipe.quantized:
            _check_products(replace(recipe, keep_bf16=KeepBf16()), dtype, device)


def _stochastic_operands(recipe: Recipe) -> Iterator[tuple[str, str, QuantSpec]]:
    for gemm, operands in GEMM_OPERANDS.items():
        for operand in operands:
            spec: QuantSpec | None = getattr(getattr(recipe, gemm), operand)
            if spec is not None and spec.rounding == "stochastic":
                yield gemm, operand, spec


def _check_unbiased(gemm: str, operand: str, spec: QuantSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Draw one operand by itself several times, by its GEMM with the identity."""
    quantized: dict[str, Any] = {operand: replace(spec, scaling="current", margin=0)}
    alone: dict[str, Any] = {gemm: GemmSpec(**quantized)}
    size = math.lcm(128, *(spec.block or ()))
    layer = LowPrecLinear(
        size, size, bias=False, device=device, dtype=dtype, recipe=Recipe("self-test", "one operand", **alone)
    )
    matrix = _without_saturation(spec, size).to(device, dtype)
    draws = torch.stack([_times_identity(layer, gemm, operand, matrix, draw) for draw in range(_DRAWS)])
    spread = float(draws.var(dim=0).mean().sqrt())
    error = float((draws.mean(dim=0) - matrix.float()).square().mean().sqrt())
    found = error * math.sqrt(_DRAWS) / spread if spread else math.inf
    # A probability in few bits is itself rounded: by 2^-bits / sqrt(12) on average, where one draw varies by 0.35.
    allowed = math.sqrt(_STANDARD_ERRORS**2 + 1.4 * _DRAWS / 4**spec.random_bits)
    if not found < allowed:
        raise UserError(
            f"self-test on {device}: {gemm}'s {operand} ({spec.format.upper()}) is not rounded without bias: the mean "
            f"of {_DRAWS} draws is {found:.2f} standard errors off, at most {allowed:.2f} expected; {_ADVICE}"
        )


def _without_saturation(spec: QuantSpec, size: int) -> torch.Tensor:
    """fp32 [size, size]: values over the whole range of the format, whose largest is in every tile."""
    largest = FORMATS[spec.format].max
    generator = torch.Generator().manual_seed(0)
    matrix = (2.0 * torch.rand(size, size, generator=generator) - 1.0) * largest
    matrix[:, :: min(8, spec.block[1] if spec.block else 8)] = largest
    # A power of two away, so that the scale has something to do.
    return matrix * 2.0**-10


def _times_identity(layer: LowPrecLinear, gemm: str, operand: str, matrix: torch.Tensor, draw: int) -> torch.Tensor:
    """fp32 ``matrix`` [rows, contracted] as it comes out of the GEMM."""
    torch.default_generator.manual_seed(draw)
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    # dgrad contracts output features, wgrad tokens: first dimensions of what a layer is given.
    turned = (gemm, operand) in (("dgrad", "weight"), ("wgrad", "grad_output"), ("wgrad", "input"))
    given = matrix.t() if turned else matrix
    operands = dict.fromkeys(("input", "weight", "grad_output"), identity) | {operand: given.contiguous()}
    product = _products(layer, operands)[gemm].float()
    # As a GEMM's second operand the matrix is what the identity was multiplied with.
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
    size = math.lcm(256, *blocks)  # of the largest Hadamard transform
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
        # The formats' own steps, relative to the values they hold; a product of nothing but zeros is 1 away.
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
        # The step that delayed scaling learns its scales from.
        _products(layer, here)
        end_step(layer)
    torch.default_generator.manual_seed(0)  # the same draws on every device
    return {gemm: product.cpu() for gemm, product in _products(layer, here).items()}


def _distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())
