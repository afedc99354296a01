"""A linear layer within ``torch.compile``: an opaque operator, or a call outside the graph.

A layer without random draws and amax histories is a pure function of x, weight and bias. ``opaque_linear`` computes it
with eager bits and without a graph break; the compiler does not see the casts, so it cannot fuse and reround them.
The wgrad of a native layer quantizes x again, from the same tensor, so the compiled layer saves x in its own dtype.

Draws and amax histories are state that the compiler does not see. It may reorder independent layers, such as q, k and
v, and remove or repeat calls. ``outside_graph`` therefore breaks the graph at such a layer.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch

from megatron_lowprec.linear.layer_tensors import backward_gemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.once_differentiable import refuse
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.schema import LinearRecipe

P = ParamSpec("P")
R = TypeVar("R")

REASON = "random draws and amax histories of megatron_lowprec layers are state outside the graph"

_recipes: list[LinearRecipe] = []
_NO_DRAWS = RngStep(0, 0)


def is_pure(linear_gemms: LinearGemms) -> bool:
    """Whether the layer's output is a function of only x, weight and bias."""
    return not linear_gemms.recipe.random and not linear_gemms.histories


def operator_key(recipe: LinearRecipe) -> int:
    """The argument of ``opaque_linear`` that names a recipe within this process; layers of a recipe share it."""
    if recipe not in _recipes:
        _recipes.append(recipe)
    return _recipes.index(recipe)


def outside_graph(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, called between two graphs."""
    disabled: Callable[P, R] = torch.compiler.disable(function, reason=REASON)
    return disabled


def opaque_linear(x_TI: torch.Tensor, w_OI: torch.Tensor, bias_O: torch.Tensor | None, key: int) -> torch.Tensor:
    """y_TO of a pure layer as one operator with a backward pass; ``key`` of ``operator_key``."""
    y: torch.Tensor = _linear(x_TI, w_OI, bias_O, key)
    return y


@lru_cache(maxsize=256)
def _gemms(key: int, shape: torch.Size) -> LinearGemms:
    # native support depends on the sizes; without draws the layer's identity has no effect
    return LinearGemms(_recipes[key], LinearId(0, "compiled"), 0, AmaxHistory)


@torch.library.custom_op("megatron_lowprec::linear", mutates_args=())
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, key: int) -> torch.Tensor:
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        return _gemms(key, weight.shape).forward(x, weight, _NO_DRAWS, bias_O=bias)[0]


@torch.library.custom_op("megatron_lowprec::linear_backward", mutates_args=())
def _linear_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    key: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> list[torch.Tensor]:
    """dx, dw and db; an empty tensor for each that is not needed."""
    linear_gemms, none = _gemms(key, weight.shape), dy.new_empty(0)
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        linear_gemms.backends.resolve(weight)
        gemms = backward_gemms(input_grad, weight_grad)
        grad = linear_gemms.grad_output(dy, _NO_DRAWS, bias=bias_grad, gemms=gemms)
        dx = linear_gemms.dgrad(grad, weight, _NO_DRAWS) if input_grad else none
        dw = linear_gemms.wgrad(grad, x, _NO_DRAWS) if weight_grad else dy.new_empty(0)
    return [dx, dw, dy.new_empty(0) if grad.bias is None else grad.bias]


@_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, key: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_linear_backward.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    key: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> list[torch.Tensor]:
    return [
        dy.new_empty(x.shape if input_grad else 0),
        dy.new_empty(tuple(weight.shape) if weight_grad else 0),
        dy.new_empty(weight.shape[:1] if bias_grad else 0),
    ]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, _, ctx.key = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():
        refuse(f"a compiled layer under recipe {_recipes[ctx.key].name}", "create_graph=True")
    x, weight = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    grads = _linear_backward(dy.contiguous(), x, weight, ctx.key, *needed)
    return *(grad if is_needed else None for grad, is_needed in zip(grads, needed)), None


_linear.register_autograd(_backward, setup_context=_save)
