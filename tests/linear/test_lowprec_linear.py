"""The three GEMMs under every recipe against ``three_gemms``, and exact properties."""

import pytest
import torch
from torch.nn.functional import linear, pad

from megatron_lowprec import LowPrecLinear, get_recipe, recipes
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
    RANDOM,
    SEED,
    T,
    all_recipes,
    assert_is,
    dtypes,
    layer_of,
    oracle,
    step,
    tensors,
)
from tests.weekly import each_kind


def test_lists_of_recipes_are_not_empty() -> None:
    drawn = ["mxfp4_rht", "mxfp4_sr", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr", "nvfp4_all", "nvfp4_four_over_six"]
    drawn += ["quartet2"]
    assert drawn == RANDOM
    assert DELAYED == ["fp8_delayed", "fp8_mxfp4_rht_sr", "fp8_lm"]


@pytest.mark.parametrize("name", each_kind(name for name in recipes() if not get_recipe(name).phases))
@dtypes
def test_products_are_those_of_plain_torch(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """In each bit, over steps and microbatches. A GEMM that is not quantized is that of bf16."""
    recipe, layer = get_recipe(name), layer_of(name, dtype)
    w = layer.weight.detach()
    amaxes: dict[str, torch.Tensor] = {}  # delayed: nothing is known in the first step, whose scale is 1
    for number in range(3):
        seen = {"input": torch.zeros(()), "weight": w.abs().max().float(), "grad_output": torch.zeros(())}
        for microbatch in range(2):
            x, dy = tensors(dtype, generator)
            x *= 2.0 ** (number + microbatch)
            got = step(layer, x, dy)
            assert all(each.dtype == dtype for each in got)
            assert all(map(torch.equal, got, oracle(recipe, x, w, dy, layer.rng_step, amaxes)))
            plain = map(torch.equal, got, oracle(get_recipe("bf16"), x, w, dy))
            assert list(plain) == [not gemm.quantized for gemm in recipe.gemms.values()]
            seen["input"] = torch.maximum(seen["input"], x.abs().max())
            seen["grad_output"] = torch.maximum(seen["grad_output"], dy.abs().max())
        end_step(layer)
        amaxes = {tensor: torch.maximum(amaxes.get(tensor, seen[tensor]), seen[tensor]) for tensor in seen}


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
    got = step(layer, x, dy)
    assert all(map(torch.equal, got, oracle(recipe, x, layer.weight.detach(), dy)))


# ---- accumulation
@pytest.mark.parametrize("name", ["bf16", "mxfp4_rht_sr", "fp8_current", "fp8_blockwise"])
def test_wgrad_accumulates_in_fp32(name: str, generator: torch.Generator) -> None:
    x, dy = tensors(torch.bfloat16, generator)
    linear_gemms = LinearGemms(get_recipe(name), LinearId(LAYER, NAME), SEED, AmaxHistory)
    total = torch.zeros(OUT, IN)
    assert linear_gemms.wgrad(dy, x, RngStep(0, 0), accumulate_into=total) is total
    assert torch.equal(total, oracle(get_recipe(name), x.float(), torch.zeros(OUT, IN), dy.float())[2])
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
