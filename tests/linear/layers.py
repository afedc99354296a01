"""Layers of every recipe, a step of one, and an explicit recomputation of its three products."""

from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from megatron_lowprec import LowPrecLinear, QuantSpec, RandomStream, Recipe, get_recipe, quantize, recipes
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.reference import decode
from megatron_lowprec.quantization.random_stream import RngStep, stream_key
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.kernels.exact import nearest

# the levels of FP8-LM have the GEMMs of fp8_lm, deepseek_v3 those of fp8_blockwise
NAMES = [name for name in recipes() if not name.startswith("fp8_lm_") and name != "deepseek_v3"]
all_recipes = pytest.mark.parametrize("name", NAMES)
STOCHASTIC = [n for n in NAMES if any(_.rounding == "stochastic" for _ in [get_recipe(n).dgrad.weight] if _)]
RANDOM = [*STOCHASTIC, "mxfp4_rht"]
DELAYED = [n for n in NAMES if get_recipe(n).delayed_operands()]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

T, IN, OUT = 100, 128, 256  # tokens are no multiple of any block
SEED, LAYER, NAME = 7, 3, "mlp.linear_fc1"


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


def exact_operand(
    matrix: torch.Tensor, spec: QuantSpec | None, rng_step: RngStep, gemm: str, operand: str, amax: float
) -> torch.Tensor:
    """float64 values that an operand's codes and scales stand for."""
    if spec is None:
        return matrix.double()
    if spec.scaling == "delayed":
        scale = torch.tensor(FORMATS[spec.format].max) / torch.tensor(amax) if amax else torch.tensor(1.0)
        elements = nearest(matrix.float() * scale, FORMATS[spec.format], "nearest_even")
        return elements * (torch.ones(()) / scale).double()
    key = stream_key(SEED, "rounding", layer=LAYER, linear=NAME, gemm=gemm, operand=operand)
    q = quantize(matrix, spec, random=RandomStream(key, rng_step))
    scale = q.decode_scale
    tile = {"tensor": tuple(matrix.shape), "row": (1, matrix.shape[1])}.get(spec.granularity) or spec.block
    assert tile is not None
    rows, columns = (torch.arange(size) // part for size, part in zip(matrix.shape, tile, strict=True))
    return decode(q.codes, q.format).double() * scale.double()[rows][:, columns] / spec.headroom


def recompute(
    recipe: Recipe, gemm: str, a: torch.Tensor, b: torch.Tensor, rng_step: RngStep, amaxes: dict[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 product of the quantized operands, and the sum of magnitudes that bounds its fp32 roundoff."""
    spec = getattr(recipe, gemm)
    if spec.hadamard is not None:
        key = stream_key(SEED, "sign", layer=LAYER, linear=NAME, gemm=gemm)
        fixed = spec.hadamard.fixed_signs
        drawn = RandomStream(key, rng_step).signs(spec.hadamard.block, a.device)
        signs = drawn if fixed is None else torch.tensor(fixed, dtype=torch.float32)
        a, b = (hadamard_transform(pad(m.float(), (0, -m.shape[1] % spec.hadamard.block)), signs) for m in (a, b))
    first, second = GEMM_OPERANDS[gemm]
    a64 = exact_operand(a, getattr(spec, first), rng_step, gemm, first, amaxes.get(first, 0.0))
    b64 = exact_operand(b, getattr(spec, second), rng_step, gemm, second, amaxes.get(second, 0.0))
    return a64 @ b64.t(), a64.abs() @ b64.abs().t()


def assert_is(got: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor], contracted: int) -> None:
    """Worst case of fp32 sums: each product, addition, scale and alpha rounds by 2^-24; bf16 2^-8."""
    exact, magnitude = want
    limit = (contracted + 6) * 2.0**-24 * magnitude
    if got.dtype == torch.bfloat16:
        limit = limit + 2.0**-8 * (exact.abs() + limit)
    assert got.shape == exact.shape
    worst = float(((got.double() - exact).abs() - limit).max())
    assert worst <= 0, worst
