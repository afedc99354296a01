"""Random draws of a layer: each forward pass draws anew, and a recomputation draws the same bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import LowPrecLinear, Recipe, UserError, get_recipe
from megatron_lowprec.linear import layer_state
from megatron_lowprec.quantization.random_stream import in_backward_pass
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.linear.layers import IN, OUT, RANDOM, SEED, T, all_recipes, layer_of, step, tensors


def drawn(name: str) -> list[bool]:
    """Whether each GEMM's result depends on draws."""
    return [gemm.random for gemm in get_recipe(name).gemms.values()]


@all_recipes
def test_draws_follow_the_seed_and_not_torchs_generator(name: str, generator: torch.Generator) -> None:
    x, dy = tensors(torch.float32, generator)

    def gradients(state: int, seed: int = SEED) -> tuple[torch.Tensor, ...]:
        layer = layer_of(name, seed=seed)
        torch.manual_seed(state)
        return step(layer, x, dy)[1:]

    first = gradients(4)
    assert all(map(torch.equal, first, gradients(5)))
    same = [torch.equal(a, b) for a, b in zip(first, gradients(4, seed=8), strict=True)]
    assert same == [not draws for draws in drawn(name)[1:]]


@all_recipes
def test_each_forward_pass_draws_anew_where_a_recipe_draws(name: str, generator: torch.Generator) -> None:
    """In other, unannounced steps as well. Dropout and the order of a shuffled data set stay those of bf16."""
    x, dy = tensors(torch.float32, generator)
    layer = layer_of(name)
    before = torch.get_rng_state()
    first, second = step(layer, x, dy), step(layer, x, dy)
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [not draws for draws in drawn(name)]
    assert torch.equal(torch.get_rng_state(), before)


@contextmanager
def evaluation(layer: LowPrecLinear) -> Iterator[None]:
    """With gradients."""
    layer.eval()
    yield
    layer.train()


EVALUATIONS = {"eval": evaluation, "no_grad": lambda _: torch.no_grad(), "inference": lambda _: torch.inference_mode()}


@pytest.mark.filterwarnings("ignore:.* scales by current amaxes")
@pytest.mark.parametrize("how", EVALUATIONS)
@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr", "all stochastic"])
def test_evaluation_changes_no_bit_of_training(name: str, how: str, generator: torch.Generator) -> None:
    """Before the first step, within a step, and after it; with a backward pass where there are gradients."""
    recipe = ALL_STOCHASTIC if name == "all stochastic" else name
    x, dy = tensors(torch.float32, generator)
    found: list[list[torch.Tensor]] = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        layer = LowPrecLinear(IN, OUT, recipe=recipe)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        found.append([])
        for _ in range(3):
            for _ in range(2):
                if evaluates:
                    with EVALUATIONS[how](layer):
                        given = (1000 * x).requires_grad_(how == "eval")
                        y = layer(given)
                        if how == "eval":
                            torch.autograd.grad(y.sum(), given)
                layer(x).backward(dy)
            found[-1].append(layer.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        found[-1] += [value.clone() for value in layer.state_dict().values()]
    assert all(map(torch.equal, *found))


def test_two_forwards_before_their_backwards_keep_their_moments(generator: torch.Generator) -> None:
    x, dy = tensors(torch.float32, generator)
    alone = layer_of("mxfp4_rht_sr")
    wanted = [step(alone, x, dy)[1] for _ in range(2)]
    layer, inputs = layer_of("mxfp4_rht_sr"), [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(each) for each in inputs]
    for y in reversed(outputs):
        y.backward(dy)
    assert all(torch.equal(i.grad, want) for i, want in zip(inputs, wanted, strict=True))


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


@pytest.mark.parametrize("name", RANDOM)
def test_draws_in_a_cuda_graph_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would repeat them."""
    monkeypatch.setattr(layer_state, "capturing", lambda: True)
    with pytest.raises(
        UserError, match=f"{name} draws by the number of a layer's passes, which replays of a CUDA graph would repeat"
    ):
        layer_of(name)(torch.zeros(T, IN))


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


def again(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, how: str) -> torch.Tensor:
    return function(x) if how == "plain" else checkpoint(function, x, use_reentrant=how == "reentrant")


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
        losses.append(again(part, x, how).mean())
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


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["mxfp4_rht_sr", "fp8_mxfp4_rht_sr"])
def test_a_layer_in_several_checkpoints_within_one(name: str, how: str) -> None:
    """As with shared layers; each use draws its own bits, also where a recomputation recomputes its parts."""
    found: list[list[torch.Tensor]] = []
    for inner, outer in (("plain", "plain"), (how, "plain"), (how, how)):
        torch.manual_seed(0)
        layer = LowPrecLinear(IN, IN, recipe=name)
        x = torch.randn(32, IN, requires_grad=True)

        def block(x: torch.Tensor, layer: LowPrecLinear = layer) -> torch.Tensor:
            return layer(x).relu()

        def part(x: torch.Tensor, inner: str = inner, block: Callable[..., torch.Tensor] = block) -> torch.Tensor:
            for _ in range(3):
                x = again(block, x, inner)
            return x

        found.append([])
        for _ in range(2):
            x.grad = layer.weight.grad = None  # sums over microbatches would be in another order
            again(part, x, outer).square().mean().backward()
            found[-1] += [x.grad, layer.weight.grad]
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
