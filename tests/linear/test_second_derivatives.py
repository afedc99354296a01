"""Only the gradient of a backward pass is defined: every other derivative is refused, none is 0 or wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp, jvp

from megatron_lowprec import LowPrecLinear, UserError, convert, get_recipe
from tests.linear.layers import NAMES

QUANTIZED = [name for name in NAMES if get_recipe(name).quantized]
SIZE = 128


def linear(recipe: str) -> LowPrecLinear:
    torch.manual_seed(0)
    return LowPrecLinear(SIZE, SIZE, recipe=recipe, name="up", num_layers=8, layer=4)


def curved(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: layer(x).tanh().square().sum()


def rows(count: int = 32) -> torch.Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(1))


def penalty(loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return gradient.square().sum()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_gradient_to_differentiate_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"create_graph=True reached up under recipe {name}, which has only the grad"):
        penalty(curved(linear(name)), rows().requires_grad_())


@pytest.mark.parametrize("name", ["mxfp8", "fp8_delayed"])
@pytest.mark.parametrize(
    "derivative",
    [lambda f, x: hvp(f, x, x), lambda f, x: hessian(f, x[:1]), lambda f, x: jvp(f, x, x)],
    ids=["hvp", "hessian", "jvp"],
)
def test_derivatives_of_some_inputs_are_refused(derivative: Any, name: str) -> None:
    """They ask autograd for x alone, which never reaches a node that torch's ``once_differentiable`` adds."""
    with pytest.raises(UserError, match="create_graph=True reached up"):
        derivative(curved(linear(name)), rows())


def forward_mode(loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(x, x)))


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "hessian": lambda f, x: torch.func.hessian(f)(x[:1]),
    "vmap": lambda f, x: torch.func.vmap(f)(x.view(4, 8, SIZE)),
}


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8_delayed"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(transform: str, name: str) -> None:
    with pytest.raises(UserError, match=rf"torch\.func reached up under recipe {name}"):
        TRANSFORMS[transform](curved(linear(name)), rows())


def test_forward_mode_is_refused() -> None:
    with pytest.raises(UserError, match="forward-mode differentiation reached up under recipe mxfp8"):
        forward_mode(curved(linear("mxfp8")), rows())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_refuse_second_derivatives(backend: str) -> None:
    """aot_autograd itself refuses the second derivative of any graph."""
    torch._dynamo.reset()
    layer = linear("mxfp8")
    loss = torch.compile(curved(layer), backend=backend, fullgraph=True)
    x = rows().requires_grad_()
    with pytest.raises(RuntimeError if backend == "aot_eager" else UserError, match=r"double backward|create_graph"):
        penalty(loss, x).backward()
    with pytest.raises((NotImplementedError, UserError), match=r"jvp|forward-mode"):  # torch's, of a graph
        forward_mode(loss, rows())
    # jvp was 0
    with pytest.raises(UserError, match=r"torch\.func reached up"):
        torch.compile(lambda x: torch.func.jvp(curved(layer), (x,), (x,)), backend=backend)(rows())


def test_without_quantization_the_second_derivative_is_torch_s() -> None:
    plain = nn.Linear(SIZE, SIZE)
    ours = linear("bf16")
    ours.load_state_dict(plain.state_dict())
    found = []
    for layer in (plain, ours):
        x = rows().requires_grad_()
        penalty(curved(layer), x).backward()
        assert x.grad is not None
        assert layer.weight.grad is not None
        found.append((x.grad, layer.weight.grad))
    assert all(map(torch.equal, *found))


def test_a_penalty_on_torch_s_own_layers_reaches_the_others() -> None:
    """It needs only the first gradient of a converted trunk: that of its output, by its backward pass."""
    trunk = convert(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()), "mxfp8")
    head = nn.Sequential(nn.Linear(SIZE, 4), nn.Tanh())
    hidden = trunk(rows())
    given = hidden.detach().requires_grad_()
    for x in (given, hidden):
        (gradient,) = torch.autograd.grad(head(x).square().sum(), head[0].weight, create_graph=True)
        gradient.square().sum().backward()
    found = [weight.grad for weight in trunk.parameters()]
    want = torch.autograd.grad(trunk(rows()), list(trunk.parameters()), given.grad)
    assert all(map(torch.equal, found, want))
