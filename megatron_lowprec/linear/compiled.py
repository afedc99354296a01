"""A linear layer within ``torch.compile``: the GEMMs that the compiler traces, and the state of a pass.

``traced_gemms`` have the layer's backends behind operators (``backends/traced.py``). The compiler traces through them
without Dynamo, so only what calls torch is in the graph. A layer with draws or amax histories begins its pass by an
operator of its own, ``begin_pass``, which the compiler keeps in order, and does not repeat where it recomputes
activations. Its casts find the layer by the result.

``opaque_linear`` hides a whole layer, for debugging: ``LowPrecLayer.opaque``.
"""

import weakref
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from megatron_lowprec.linear.backends.traced import TracedGemms, define, number_of, recipe_of
from megatron_lowprec.linear.layer_tensors import backward_gemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.once_differentiable import refuse
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import NO_DRAWS

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_next_number = count()


def identity_of(layer: Any) -> torch.Tensor:
    """int64 [1] on the CPU that tells graphs, which layers share, which ``StatefulLayer`` runs."""
    number = next(_next_number)
    _layers[number] = layer
    return torch.tensor([number])


@lru_cache(maxsize=1024)
def traced_gemms(key: int, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> LinearGemms:
    """The GEMMs of a graph, of a recipe and a weight; native support depends on the sizes."""
    gemms = LinearGemms(recipe_of(key), LinearId(0, "compiled"), 0, AmaxHistory, histories={})
    gemms.backends.wrap(lambda backend: TracedGemms(backend, key))
    return gemms


def traced_pass(identity: torch.Tensor | None, grad: bool) -> torch.Tensor | None:
    """The pass of a layer that begins, as ``begin_pass``. Activation recomputation saves it: another would draw anew.

    Args:
        identity: of ``identity_of``; None for a layer without state.
        grad: whether gradients are enabled.
    """
    if identity is None:
        return None
    mode = get_proxy_mode()
    before = 0 if mode is None else len(mode.tracer.graph.nodes)
    at: torch.Tensor = begin_pass(identity, grad)
    if mode is not None:
        for node in list(mode.tracer.graph.nodes)[before:]:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return at


def _begin_pass(identity: torch.Tensor, grad: bool) -> torch.Tensor:
    layer = _layers[int(identity)]
    layer.histories.to(layer.weight.device)  # a wrapper may have moved the weight without a call of the layer
    # compiled code runs within an autograd function of its own, which turns gradients off
    within = grad and not torch.is_grad_enabled()
    with torch.set_grad_enabled(grad or torch.is_grad_enabled()):
        gemms = layer.begin_pass(own_node=within)
    # the GEMMs of experts have no backends in common
    return torch.tensor([number_of(getattr(gemms, "backends", gemms)), *layer.rng_step])


begin_pass = define(
    "begin_pass",
    "(Tensor(a!) identity, bool grad) -> Tensor",
    _begin_pass,
    lambda identity, grad: torch.empty(3, dtype=torch.int64),
    "cudagraph_unsafe",
)
"""``StatefulLayer.begin_pass``: int64 [3] on the CPU, number of the pass's GEMMs or backends, step and microbatch.

The mutation of ``identity`` keeps calls in order, and each of them.
"""


# ---- a whole layer as one operator
def opaque_linear(x_TI: torch.Tensor, w_OI: torch.Tensor, bias_O: torch.Tensor | None, key: int) -> torch.Tensor:
    """y_TO of a pure layer as one operator with a backward pass; ``key`` of ``recipe_key``.

    A pure layer has no draws and histories. A native one quantizes x again for wgrad, with equal bits.
    """
    y: torch.Tensor = _linear(x_TI, w_OI, bias_O, key)
    return y


@lru_cache(maxsize=256)
def _gemms(key: int, device: torch.device, shape: torch.Size) -> LinearGemms:
    # native support depends on the sizes; without draws the layer's identity has no effect. The backward passes of
    # several devices run at once, each with the backends of its own
    return LinearGemms(recipe_of(key), LinearId(0, "compiled"), 0, AmaxHistory)


@torch.library.custom_op("megatron_lowprec::linear", mutates_args=())
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, key: int) -> torch.Tensor:
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        return _gemms(key, x.device, weight.shape).forward(x, weight, NO_DRAWS, bias_O=bias)[0]


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
    linear_gemms, none = _gemms(key, dy.device, weight.shape), dy.new_empty(0)
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        linear_gemms.backends.resolve(weight)
        gemms = backward_gemms(input_grad, weight_grad)
        grad = linear_gemms.grad_output(dy, NO_DRAWS, bias=bias_grad, gemms=gemms)
        dx = linear_gemms.dgrad(grad, weight, NO_DRAWS) if input_grad else none
        dw = linear_gemms.wgrad(grad, x, NO_DRAWS) if weight_grad else dy.new_empty(0)
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
        refuse(f"a compiled layer under recipe {recipe_of(ctx.key).name}", "create_graph=True")
    x, weight = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    grads = _linear_backward(dy.contiguous(), x, weight, ctx.key, *needed)
    return *(grad if is_needed else None for grad, is_needed in zip(grads, needed)), None


_linear.register_autograd(_backward, setup_context=_save)
