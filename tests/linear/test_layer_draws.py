"""Random draws of a layer: each forward pass draws anew, and a recomputation draws the same bits."""

from typing import Any

import pytest
import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from megatron_lowprec import LowPrecLinear, Recipe
from megatron_lowprec.quantization.random_stream import in_backward_pass
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.linear.layers import IN, RANDOM, SEED, all_recipes, layer_of, step, tensors


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
