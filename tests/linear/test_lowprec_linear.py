"""The three GEMMs under every recipe against an explicit recomputation: quantized operands and a float64 product."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout, linear, pad
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import (
    KeepBf16,
    LowPrecLinear,
    QuantSpec,
    RandomStream,
    Recipe,
    UserError,
    get_recipe,
    quantize,
    recipes,
)
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.kernels.quantize.reference import decode
from megatron_lowprec.linear import emulated_gemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, LinearId
from megatron_lowprec.linear.lowprec_linear import end_step
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep, in_backward_pass, stream_key
from megatron_lowprec.recipe.parsing import load_recipe
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


def test_lists_of_recipes_are_not_empty() -> None:
    assert STOCHASTIC == ["mxfp4_sr", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr"]
    assert DELAYED == ["fp8_delayed", "fp8_mxfp4_rht_sr", "fp8_lm"]


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


# ---- the recomputation
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
        signs = RandomStream(key, rng_step).signs(spec.hadamard.block, a.device)
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


# ---- randomness
@all_recipes
def test_same_state_of_the_generator_same_bits(name: str, generator: torch.Generator) -> None:
    x, dy = tensors(torch.float32, generator)

    def gradients(draws: int, seed: int = SEED) -> tuple[torch.Tensor, ...]:
        layer = layer_of(name, seed=seed)
        torch.manual_seed(draws)
        return step(layer, x, dy)[1:]

    first = gradients(4)
    assert all(map(torch.equal, first, gradients(4)))
    for other in (gradients(5), gradients(4, seed=8)):
        same = [torch.equal(a, b) for a, b in zip(first, other, strict=True)]
        assert same == [name not in RANDOM] * 2


@all_recipes
def test_each_forward_pass_draws_anew_where_a_recipe_draws(name: str, generator: torch.Generator) -> None:
    """In other, unannounced steps as well; without draws the generator stays as it is."""
    x, dy = tensors(torch.float32, generator)
    layer = layer_of(name)
    before = torch.get_rng_state()
    first, second = step(layer, x, dy), step(layer, x, dy)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] + [name not in RANDOM] * 2
    assert torch.equal(torch.get_rng_state(), before) == (name not in RANDOM)


def test_two_forwards_before_their_backwards_keep_their_moments(generator: torch.Generator) -> None:
    x, dy = tensors(torch.float32, generator)
    alone = layer_of("mxfp4_rht_sr")
    wanted = [step(alone, x, dy)[1] for _ in range(2)]
    layer, inputs = layer_of("mxfp4_rht_sr"), [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(each) for each in inputs]
    for y in reversed(outputs):
        y.backward(dy)
    assert all(torch.equal(i.grad, want) for i, want in zip(inputs, wanted, strict=True))


# ---- several GPUs in one process
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["mxfp4_rht_sr", "fp8_current", "fp8_delayed"])
def test_a_layer_need_not_be_on_the_current_gpu(name: str, generator: torch.Generator) -> None:
    given = tensors(torch.bfloat16, generator)
    found: list[list[torch.Tensor]] = []
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        layer = layer_of(name, torch.bfloat16).to(device)
        found.append([])
        for _ in range(2):
            found[-1] += [tensor.cpu() for tensor in step(layer, *(tensor.to(device) for tensor in given))]
            end_step(layer)
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["mxfp4_rht_sr", "fp8_delayed"])
def test_a_layer_makes_its_device_the_current_one(
    name: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here on a stand-in for a device's being current: no product, cast or update of a history goes without it."""
    current: list[torch.device] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor.device)
        yield
        current.pop()

    def recorded(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert current == [torch.device("cpu")]
            calls.append(inner.__name__)
            return inner(*args, **kwargs)

        return call

    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(LinearGemms, "forward", recorded(LinearGemms.forward))
    monkeypatch.setattr(AmaxHistory, "update", recorded(AmaxHistory.update))
    layer, (x, _) = layer_of(name), tensors(torch.float32, generator)
    layer(x)
    end_step(layer)
    assert set(calls) == ({"forward", "update"} if name in DELAYED else {"forward"})
    assert current == []


# ---- delayed scaling
@pytest.mark.parametrize("name", DELAYED)
def test_evaluation_leaves_no_trace(name: str, generator: torch.Generator) -> None:
    x, dy = tensors(torch.float32, generator)
    layer = layer_of(name)
    step(layer, x, dy)
    newest = [h.newest.clone() for h, _ in layer.linear_gemms.histories.values()]
    with torch.no_grad():
        layer(x * 1000)
    assert all(
        torch.equal(h.newest, n) for (h, _), n in zip(layer.linear_gemms.histories.values(), newest, strict=True)
    )


def test_delayed_scale_is_one_and_then_maximum_over_amax(generator: torch.Generator) -> None:
    layer, (x, dy) = layer_of("fp8_delayed"), tensors(torch.float32, generator)
    x[0, 0] = 500.0  # beyond 448: saturates while the scale is 1
    y, _, _ = step(layer, x, dy)
    saturated = nearest(x, FORMATS["e4m3"], "nearest_even")
    w = layer.weight.detach()
    plain = nearest(w, FORMATS["e4m3"], "nearest_even")
    assert float(saturated[0, 0]) == 448.0
    assert_is(y, (saturated @ plain.t(), saturated.abs() @ plain.t().abs()), IN)
    end_step(layer)
    history, slot = layer.linear_gemms.histories["input"]
    assert history.in_effect[slot].item() == 500.0
    history, slot = layer.linear_gemms.histories["grad_output"]
    assert history.in_effect[slot].item() == dy.abs().max().item()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW, tensor by tensor": partial(torch.optim.AdamW, foreach=False),
    "SGD": torch.optim.SGD,
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
}


def train(name: str, optimizer: Callable[..., torch.optim.Optimizer], told: bool, frozen: bool) -> list[torch.Tensor]:
    """Losses, an amax and a state dict of steps of two microbatches, an evaluation between; ``told`` by end_step."""
    layers = layer_of(name), LowPrecLinear(OUT, IN, recipe=name)
    model = torch.nn.Sequential(*layers)
    layers[1].weight.requires_grad_(not frozen)
    update = optimizer([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    found, generator = [], torch.Generator().manual_seed(5)
    torch.manual_seed(6)
    for number in range(4):
        update.zero_grad()
        for _ in range(2):
            x = torch.randn(T, IN, generator=generator) * 2.0**number
            loss = (model(x) - x).square().mean()
            loss.backward()
            found.append(loss.detach())
        update.step()
        if told:
            end_step(model)
        if number == 2:
            found += [state.clone() for state in model.state_dict().values()]
        else:
            with torch.no_grad():
                found.append(model(x))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_mxfp4_rht_sr"])
def test_scales_follow_an_optimizer_without_being_told(
    name: str, frozen: bool, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    got, want = (train(name, optimizer, told, frozen) for told in (False, True))
    assert all(map(torch.equal, got, want))


def test_scales_stay_within_a_step_and_where_nothing_was_trained(generator: torch.Generator) -> None:
    layer, (x, dy) = layer_of("fp8_delayed"), tensors(torch.float32, generator)
    history, slot = layer.linear_gemms.histories["input"]
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for _ in range(3):
        step(layer, x, dy)
    assert history.in_effect[slot] == 0.0
    other.step()  # of the layer's optimizer or not: an update ends what was observed
    layer(x)
    assert history.in_effect[slot] == x.abs().max()
    for _ in range(3):
        with torch.no_grad():
            layer(8 * x)
        other.step()
    layer(x)
    # what the training pass has seen came in once, and nothing of evaluations
    assert history.window[:3, slot].tolist() == [float(x.abs().max())] * 2 + [0.0]


# ---- activation recomputation by torch
ALL_STOCHASTIC = load_recipe(
    "mxfp8",
    [f"{gemm}.{operand}.rounding=stochastic" for gemm, operands in GEMM_OPERANDS.items() for operand in operands],
)


class Watched(LowPrecLinear):
    """Keeps what its forward passes return, and whether they were recomputations."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outputs: dict[bool, list[torch.Tensor]] = {False: [], True: []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.outputs[in_backward_pass()].append(y.detach().clone())
        return y


def checkpointed(how: str, in_order: bool, recipe: Recipe | str) -> tuple[list[torch.Tensor], list[Watched]]:
    """Gradients of three microbatches in flight, of a part that uses a layer twice and has dropout; its layers."""
    torch.manual_seed(0)
    layers = [Watched(IN, IN, recipe=recipe, name=name) for name in ("first", "second")]

    def part(x: torch.Tensor) -> torch.Tensor:
        for layer in (layers[0], layers[1], layers[0]):
            x = dropout(layer(x).relu(), 0.2)
        return x.square()

    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(3):
        x = torch.randn(64, IN, generator=generator, requires_grad=True) * 1.0
        y = part(x) if how == "plain" else checkpoint(part, x, use_reentrant=how == "reentrant")
        losses.append(y.mean())
    for loss in losses if in_order else losses[::-1]:
        loss.backward()
    return [weight.grad for layer in layers for weight in layer.parameters()], layers


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    "recipe", ["mxfp4_rht_sr", "fp8_mxfp4_rht_sr", pytest.param(ALL_STOCHASTIC, id="every operand stochastic")]
)
def test_recomputation_draws_the_bits_of_its_first_pass(how: str, in_order: bool, recipe: Recipe | str) -> None:
    want, _ = checkpointed("plain", in_order, recipe)
    got, layers = checkpointed(how, in_order, recipe)
    for layer, uses in zip(layers, (2, 1), strict=True):
        first, again = layer.outputs[False], layer.outputs[True]
        assert len(first) == len(again) == 3 * uses
        parts = [again[at : at + uses] for at in range(0, len(again), uses)]
        again = [y for part in (parts if in_order else parts[::-1]) for y in part]
        assert all(map(torch.equal, again, first))
    assert all(map(torch.equal, got, want))


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


# ---- shards of a layer, as tensor parallelism cuts it
def operands_of(
    monkeypatch: pytest.MonkeyPatch,
    recipe: Recipe,
    place: LinearId,
    tensors: dict[str, torch.Tensor],
    reduce_amax: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor | None]]:
    """Data and scale of each GEMM's operands."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def gemm(a: torch.Tensor, b: torch.Tensor, *, a_scale: Any, b_scale: Any, **_: Any) -> torch.Tensor:
        found.extend(((a, a_scale), (b, b_scale)))
        return a

    with monkeypatch.context() as patch:
        patch.setattr(emulated_gemms, "gemm", gemm)
        run = LinearGemms(recipe, place, SEED, AmaxHistory, reduce_amax)
        for history, slot in run.histories.values():
            history.in_effect[slot] = 3.0
        run.fprop(tensors["x"], tensors["w"], RngStep(2, 1))
        run.dgrad(tensors["dy"], tensors["w"], RngStep(2, 1))
        run.wgrad(tensors["dy"], tensors["x"], RngStep(2, 1))
    return dict(zip(DIMS, found, strict=True))


@all_recipes
@pytest.mark.parametrize(("split", "gated"), [("O", False), ("I", False), ("O", True)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_hold_the_codes_and_scales_of_the_whole(
    name: str, split: str, gated: bool, ranks: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    recipe, sizes = get_recipe(name), {"T": 70, "I": 512, "O": 1024 if gated else 512}
    dims = {"x": "TI", "w": "OI", "dy": "TO"}
    whole = {n: torch.randn([sizes[d] for d in ds], generator=generator).bfloat16() for n, ds in dims.items()}
    want = operands_of(monkeypatch, recipe, LinearId(LAYER, NAME), whole)
    part = sizes[split] // ranks
    half = sizes[split] // 2

    def indices(rank: int) -> torch.Tensor:
        """Which of the whole's indices a rank holds: a gated layer's two halves are cut each by itself."""
        if not gated:
            return torch.arange(part) + rank * part
        gate = torch.arange(part // 2) + rank * (part // 2)
        return torch.cat((gate, gate + half))

    def shard(rank: int) -> tuple[LinearId, dict[str, torch.Tensor]]:
        cut = {
            n: t.index_select(dims[n].index(split), indices(rank)) if split in dims[n] else t for n, t in whole.items()
        }
        span = ShardSlice(rank * part // 2, part // 2, half - part // 2) if gated else ShardSlice(rank * part)
        return LinearId(LAYER, NAME, spans={split: span}, split=split), cut

    # what each rank would send to the reduction, then the maximum over ranks
    sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        operands_of(monkeypatch, recipe, *shard(rank), lambda amax, log=sent[rank]: (log.append(amax), amax)[1])
    assert len({len(log) for log in sent}) == 1
    reduced = [torch.stack(amaxes).amax(0) for amaxes in zip(*sent, strict=True)]
    for rank in range(ranks):
        answers = iter(reduced)
        got = operands_of(monkeypatch, recipe, *shard(rank), lambda _, answers=answers: next(answers))
        for (gemm, operand), letters in DIMS.items():
            (mine, my_scale), (full, scale) = got[gemm, operand], want[gemm, operand]
            elements = full
            if split in letters:
                elements = elements.index_select(letters.index(split), indices(rank))
            assert torch.equal(mine, elements), (gemm, operand)
            assert (my_scale is None) == (scale is None)
            if my_scale is not None and scale is not None:
                if split in letters and scale.shape[letters.index(split)] > 1:
                    dim = letters.index(split)
                    tile = sizes[split] // scale.shape[dim]
                    scale = scale.index_select(dim, indices(rank)[::tile] // tile)
                assert torch.equal(my_scale, scale), (gemm, operand)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", "mxfp8"])
def test_amax_is_reduced_exactly_where_a_tile_reaches_over_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    whole = {
        "x": torch.randn(64, 128, generator=generator),
        "w": torch.randn(128, 128, generator=generator),
        "dy": torch.randn(64, 128, generator=generator),
    }
    calls: list[tuple[int, ...]] = []

    def count(amax: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(amax.shape))
        return amax

    expected = {
        # column parallel: w in fprop and dgrad, dy in dgrad and wgrad are cut; rows by their contracted dimension
        ("fp8_current", "O"): [(1, 1)] * 4,
        ("fp8_rowwise", "O"): [(64, 1), (128, 1)],  # dgrad contracts O
        ("fp8_current", "I"): [(1, 1)] * 4,
        ("fp8_rowwise", "I"): [(64, 1), (128, 1)],  # fprop contracts I
    }
    for split in ("O", "I"):
        calls.clear()
        operands_of(monkeypatch, get_recipe(name), LinearId(LAYER, NAME, split=split), whole, count)
        assert calls == expected.get((name, split), [])


# ---- construction
def test_sizes_are_checked_when_built() -> None:
    with pytest.raises(
        UserError, match=r"mxfp8: fprop of layers\.1\.linear has .* 80 input features are no multiple of 32"
    ):
        LowPrecLinear(80, 64, recipe="mxfp8")
    with pytest.raises(UserError, match="there is no recipe 'mxpf8'"):
        LowPrecLinear(64, 64, recipe="mxpf8")


def quantizes(layer: LowPrecLinear) -> bool:
    x = torch.randn(4, layer.in_features, generator=torch.Generator().manual_seed(1))
    return not torch.equal(layer(x), linear(x, layer.weight, layer.bias))


def test_layers_that_a_recipe_keeps_in_bf16() -> None:
    keep = KeepBf16(first_layers=1, last_layers=2, names=("*.proj", "layers.3.*"))
    recipe = replace(get_recipe("fp8_delayed"), keep_bf16=keep)
    quantized = {
        (layer, name): quantizes(LowPrecLinear(IN, OUT, recipe=recipe, layer=layer, name=name, num_layers=6))
        for layer in range(1, 7)
        for name in ("up", "proj")
    }
    assert [place for place, is_so in quantized.items() if is_so] == [(2, "up"), (4, "up")]
    # a layer that is left alone needs no sizes that blocks divide, and has no amax histories
    assert "amax.input" not in LowPrecLinear(81, 64, recipe=recipe, layer=1, num_layers=6).state_dict()
    LowPrecLinear(81, 64, recipe=replace(get_recipe("mxfp8"), keep_bf16=keep), layer=6, num_layers=6)


def test_last_layers_need_the_number_of_layers() -> None:
    with pytest.raises(
        UserError, match=r"fp8_current_bf16_ends keeps the last 1 layers in bf16: pass num_layers=\.\.\."
    ):
        LowPrecLinear(64, 64, recipe="fp8_current_bf16_ends")
    with pytest.raises(UserError, match="layer=5 of num_layers=4"):
        LowPrecLinear(64, 64, recipe="fp8_current", layer=5, num_layers=4)
    first = replace(get_recipe("fp8_current"), keep_bf16=KeepBf16(first_layers=1))
    assert [quantizes(LowPrecLinear(IN, OUT, recipe=first, layer=layer)) for layer in (1, 2)] == [False, True]


def test_layer_is_a_drop_in() -> None:
    torch.manual_seed(3)
    ours = LowPrecLinear(64, 96, recipe="mxfp8")
    torch.manual_seed(3)
    theirs = torch.nn.Linear(64, 96)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert torch.equal(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())
    assert ours(torch.randn(2, 3, 64)).shape == (2, 3, 96)
    assert torch.equal(ours(torch.zeros(64)), ours.bias)


def test_frozen_weight_draws_anew_in_each_microbatch(generator: torch.Generator) -> None:
    """Adapters freeze weights: the input gradient still rounds stochastically."""
    layer, (x, dy) = layer_of("mxfp4_sr"), tensors(torch.float32, generator)
    layer.weight.requires_grad_(False)
    gradients = []
    for _ in range(2):
        each = x.clone().requires_grad_()
        layer(each).backward(dy)
        gradients.append(each.grad)
    assert not torch.equal(*gradients)


def test_histories_that_move_each_microbatch_follow_the_forward_passes() -> None:
    overrides = [
        f"{gemm}.{operand}.history_update=microbatch" for gemm, pair in GEMM_OPERANDS.items() for operand in pair
    ]
    moving, held = (LowPrecLinear(64, 32, recipe=load_recipe("fp8_delayed", fields)) for fields in (overrides, []))
    for layer in (moving, held):
        for size in (1.0, 10.0, 1.0):
            layer(torch.full((16, 64), size)).sum().backward()
    amaxes = [
        {operand: float(history.in_effect[slot]) for operand, (history, slot) in layer.linear_gemms.histories.items()}
        for layer in (moving, held)
    ]
    assert amaxes[0]["input"] == 10.0
    assert set(amaxes[1].values()) == {0.0}
