"""The three GEMMs under every recipe against an explicit recomputation: quantized operands and a float64 product."""

import pytest
import torch
from torch.nn.functional import linear, pad

from megatron_lowprec import LowPrecLinear, get_recipe
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.lowprec_linear import end_step
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from tests.linear.layers import (
    DELAYED,
    IN,
    LAYER,
    NAME,
    NAMES,
    OUT,
    SEED,
    STOCHASTIC,
    T,
    all_recipes,
    assert_is,
    dtypes,
    layer_of,
    recompute,
    step,
    tensors,
)


def test_lists_of_recipes_are_not_empty() -> None:
    assert STOCHASTIC == ["mxfp4_sr", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr"]
    assert DELAYED == ["fp8_delayed", "fp8_mxfp4_rht_sr", "fp8_lm"]


@all_recipes
@dtypes
def test_products_are_the_recomputed_ones(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    recipe, layer = get_recipe(name), layer_of(name, dtype)
    w = layer.weight.detach()
    amaxes: dict[str, float] = {}  # delayed: nothing is known in the first step, whose scale is 1
    for number in range(3):
        seen = {"input": 0.0, "weight": float(w.abs().max()), "grad_output": 0.0}
        for microbatch in range(2):
            x, dy = tensors(dtype, generator)
            x *= 2.0 ** (number + microbatch)
            y, dx, dw = step(layer, x, dy)
            rng_step = layer.rng_step
            assert y.dtype == dx.dtype == dw.dtype == dtype
            assert_is(y, recompute(recipe, "fprop", x, w, rng_step, amaxes), IN)
            assert_is(dx, recompute(recipe, "dgrad", dy, w.t(), rng_step, amaxes), OUT)
            assert_is(dw, recompute(recipe, "wgrad", dy.t(), x.t(), rng_step, amaxes), T)
            seen["input"] = max(seen["input"], float(x.abs().max()))
            seen["grad_output"] = max(seen["grad_output"], float(dy.abs().max()))
        end_step(layer)
        amaxes = {operand: max(amaxes.get(operand, 0.0), seen[operand]) for operand in recipe.delayed_operands()}


@pytest.mark.parametrize("name", [n for n in NAMES if n != "bf16"])
def test_recomputation_can_tell_quantized_from_plain(name: str, generator: torch.Generator) -> None:
    x, dy = tensors(torch.float32, generator)
    layer = layer_of(name)
    _, _, dw = step(layer, x, dy)
    plain = (dy.double().t() @ x.double(), dy.double().abs().t() @ x.double().abs())
    if get_recipe(name).wgrad.quantized:
        with pytest.raises(AssertionError):
            assert_is(dw, plain, T)
    else:
        assert name == "fp8_rowwise_gw_hp"
        assert_is(dw, plain, T)


@dtypes
@pytest.mark.parametrize("shape", [(T,), (5, 7)])
def test_bf16_recipe_is_torchs_linear(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> None:
    layer = layer_of("bf16", dtype)
    x, dy = torch.randn(*shape, IN, generator=generator).to(dtype), torch.randn(*shape, OUT, generator=generator)
    y, dx, dw = step(layer, x, dy.to(dtype))
    stock_x, stock_w = x.clone().requires_grad_(), layer.weight.detach().clone().requires_grad_()
    stock_y = linear(stock_x, stock_w)
    stock_y.backward(dy.to(dtype))
    assert torch.equal(y, stock_y)
    assert torch.equal(dx, stock_x.grad)
    assert torch.equal(dw, stock_w.grad)


def test_bias_is_added_and_has_its_gradient(generator: torch.Generator) -> None:
    layer = LowPrecLinear(IN, OUT, recipe="mxfp4")
    x, dy = tensors(torch.float32, generator)
    y = layer(x)
    y.backward(dy)
    assert torch.equal(y, x @ layer.weight.t() + layer.bias)  # mxfp4's forward is plain
    assert torch.equal(layer.bias.grad, dy.sum(0))


# ---- exact properties
@pytest.mark.parametrize("name", [n for n in NAMES if n not in DELAYED])
@dtypes
def test_gradients_are_homogeneous_in_powers_of_two(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Twice the gradient has the same codes under twice the scales, draws included."""
    x, dy = tensors(dtype, generator)
    _, dx, dw = step(layer_of(name, dtype), x, dy)
    for factor in (2.0, 0.125, -1.0):
        _, dx2, dw2 = step(layer_of(name, dtype), x, dy * factor)
        assert torch.equal(dx2, dx * factor)
        assert torch.equal(dw2, dw * factor)


@all_recipes
def test_zero_gradient_gives_zero_gradients(name: str, generator: torch.Generator) -> None:
    x, dy = tensors(torch.float32, generator)
    _, dx, dw = step(layer_of(name), x, torch.zeros_like(dy))
    assert not dx.any()
    assert not dw.any()


@all_recipes
@pytest.mark.parametrize("tokens", [1, 31, 33, 100])
def test_tokens_are_padded_with_zeros(name: str, tokens: int, generator: torch.Generator) -> None:
    """The padded batch has the same codes; only the order of fp32 sums may differ, by what assert_is allows."""
    x, dy = tensors(torch.float32, generator, tokens)
    y, dx, dw = step(layer_of(name), x, dy)
    more = (0, 0, 0, 256 - tokens)
    yp, dxp, dwp = step(layer_of(name), pad(x, more), pad(dy, more))
    w = layer_of(name).weight.detach()
    for got, padded, a, b, contracted in (
        (y, yp[:tokens], x, w, IN),
        (dx, dxp[:tokens], dy, w.t(), OUT),
        (dw, dwp, dy.t(), x.t(), 256),
    ):
        # magnitudes of the operands bound those of the quantized ones but for FP4's largest error, 4/3
        assert_is(got, (padded.double(), 2 * (4 / 3) ** 2 * a.double().abs() @ b.double().abs().t()), contracted)
    assert not yp[tokens:].any()
    assert not dxp[tokens:].any()


@all_recipes
@dtypes
def test_no_tokens(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    layer = layer_of(name, dtype)
    x, dy = tensors(dtype, generator, 0)
    y, dx, dw = step(layer, x, dy)
    assert (y.shape, dx.shape) == ((0, OUT), (0, IN))
    assert dw.shape == layer.weight.shape
    assert not dw.any()


# ---- partial blocks
def test_blocks_of_128_may_be_partial_at_the_ends(generator: torch.Generator) -> None:
    recipe, features, outputs = get_recipe("fp8_blockwise"), 200, 72
    layer = LowPrecLinear(features, outputs, bias=False, recipe=recipe, seed=SEED, layer=LAYER, name=NAME)
    x, dy = (torch.randn(T, size, generator=generator) for size in (features, outputs))
    y, dx, dw = step(layer, x, dy)
    w, rng_step = layer.weight.detach(), layer.rng_step
    assert_is(y, recompute(recipe, "fprop", x, w, rng_step, {}), features)
    assert_is(dx, recompute(recipe, "dgrad", dy, w.t(), rng_step, {}), outputs)
    assert_is(dw, recompute(recipe, "wgrad", dy.t(), x.t(), rng_step, {}), T)


# ---- accumulation
@pytest.mark.parametrize("name", ["bf16", "mxfp4_rht_sr", "fp8_current", "fp8_blockwise"])
def test_wgrad_accumulates_in_fp32(name: str, generator: torch.Generator) -> None:
    x, dy = tensors(torch.bfloat16, generator)
    linear_gemms = LinearGemms(get_recipe(name), LinearId(LAYER, NAME), SEED, AmaxHistory)
    total = torch.zeros(OUT, IN)
    assert linear_gemms.wgrad(dy, x, RngStep(0, 0), accumulate_into=total) is total
    assert_is(total, recompute(get_recipe(name), "wgrad", dy.t(), x.t(), RngStep(0, 0), {}), T)
    assert not torch.equal(total, total.bfloat16().float())
    once = total.clone()
    linear_gemms.wgrad(dy, x, RngStep(0, 0), accumulate_into=total)
    assert torch.equal(total, 2 * once)


@all_recipes
def test_emulated_gradients_are_quantized_one_direction_at_a_time(name: str, generator: torch.Generator) -> None:
    """Without a kernel that gives both directions, each operand lives for its GEMM alone: one dy less of memory."""
    _, dy = tensors(torch.bfloat16, generator)
    grad = LinearGemms(get_recipe(name), LinearId(LAYER, NAME), SEED, AmaxHistory).grad_output(dy, RngStep(0, 0))
    assert grad.quantized is None
    assert grad.matrix is dy
