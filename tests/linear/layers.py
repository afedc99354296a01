"""Layers of every recipe, a step of one, and its three products in plain torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowprec import LowPrecLinear, Recipe, get_recipe, recipes
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.activation_spec import ActivationSpec
from megatron_lowprec.recipe.recipe import GradientSpec, KeepBf16, OptimizerSpec
from megatron_lowprec.three_gemms import Draws, three_gemms
from tests.weekly import each_kind

# the levels of FP8-LM have the GEMMs of fp8_lm, deepseek_v3 those of fp8_blockwise, nvfp4 and its phases those of
# nvfp4_all
_REPEATED = ("deepseek_v3", "nvfp4", "nvfp4_bf16_tail")
NAMES = [name for name in recipes() if not name.startswith("fp8_lm_") and name not in _REPEATED]
all_recipes = pytest.mark.parametrize("name", each_kind(NAMES))
RANDOM = [name for name in NAMES if get_recipe(name).random]
DELAYED = [n for n in NAMES if get_recipe(n).delayed_operands()]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

T, IN, OUT = 100, 128, 256  # tokens are no multiple of any block
SEED, LAYER, NAME = 7, 3, "mlp.linear_fc1"
_FIRST = RngStep(0, 0)


def of_layers(name: str) -> Recipe:
    """A recipe's GEMMs in all layers, without what is not of layers."""
    plain: dict[str, Any] = {"keep_bf16": KeepBf16(), "fp8_weights": False, "optimizer": OptimizerSpec(), "rules": ()}
    return replace(get_recipe(name), **plain, gradients=GradientSpec(), activations=ActivationSpec())


def layer_of(name: str, dtype: torch.dtype = torch.float32, seed: int = SEED) -> LowPrecLinear:
    torch.manual_seed(0)
    options: dict[str, Any] = {"seed": seed, "layer": LAYER, "name": NAME, "num_layers": 2 * LAYER}
    return LowPrecLinear(IN, OUT, bias=False, dtype=dtype, recipe=name, **options)


def tensors(dtype: torch.dtype, generator: torch.Generator, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor]:
    x, dy = torch.randn(tokens, IN, generator=generator), torch.randn(tokens, OUT, generator=generator) * 1e-3
    return x.to(dtype), dy.to(dtype)


def step(layer: LowPrecLinear, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx, dw of one microbatch."""
    x = x.detach().clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


def oracle(
    recipe: Recipe,
    x: torch.Tensor,
    w: torch.Tensor,
    dy: torch.Tensor,
    rng_step: RngStep = _FIRST,
    amaxes: dict[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx, dw of ``layer_of`` by ``three_gemms``: equal bits on a CPU, which sums in the same order."""
    return three_gemms(recipe, x, w, dy, Draws(SEED, LAYER, NAME, rng_step), amaxes or {})


def assert_is(got: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor], contracted: int) -> None:
    """Worst case of fp32 sums: each product, addition, scale and alpha rounds by 2^-24; bf16 2^-8."""
    exact, magnitude = want
    limit = (contracted + 6) * 2.0**-24 * magnitude
    if got.dtype == torch.bfloat16:
        limit = limit + 2.0**-8 * (exact.abs() + limit)
    assert got.shape == exact.shape
    worst = float(((got.double() - exact).abs() - limit).max())
    assert worst <= 0, worst
