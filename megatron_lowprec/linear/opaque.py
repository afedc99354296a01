"""A whole layer as one operator of ``torch.compile``: of codes, or of a weight in memory.

The latter is for debugging, and for inputs that data may leave without tokens, which have no graph of their own.

A tensor subclass would be taken apart by the compiler, which does not see the codes as one weight; so the operator
takes codes and scales. It is for layers without random draws and amax histories: a pure function of x, weight and bias,
with eager bits. A native layer quantizes x again for wgrad, with equal bits.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from megatron_lowprec.linear.backends.traced import recipe_of
from megatron_lowprec.linear.layer_tensors import backward_gemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.once_differentiable import refuse
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.frozen_weight import FrozenWeight, StoredSpecs
from megatron_lowprec.quantization.random_stream import NO_DRAWS


class StoredCodes(NamedTuple):
    """Arguments of ``FrozenWeight`` besides its tensors."""

    specs: StoredSpecs
    shape_OI: tuple[int, ...]  # noqa: N815 - a shape suffix
    dtype: torch.dtype


IN_MEMORY = 0
"""In place of ``number_of_codes``, for a weight that is one tensor."""

_known: list[StoredCodes | None] = [None]


def number_of_codes(codes: StoredCodes) -> int:
    """The argument of ``opaque_linear`` that names how a weight is stored, within this process."""
    if codes not in _known:
        _known.append(codes)
    return _known.index(codes)


def opaque_linear(
    x_TI: torch.Tensor, weight: list[torch.Tensor], bias_O: torch.Tensor | None, key: int, codes: int = IN_MEMORY
) -> torch.Tensor:
    """y_TO of a pure layer as one operator with a backward pass.

    Args:
        weight: [O, I], or ``FrozenWeight.stored``.
        key: of ``recipe_key``.
        codes: of ``number_of_codes``.
    """
    y: torch.Tensor = _linear(x_TI, weight, bias_O, key, codes)
    return y


def _weight(tensors: Sequence[torch.Tensor], codes: int) -> torch.Tensor:
    known = _known[codes]
    return tensors[0] if known is None else FrozenWeight(known.specs, tensors, known.shape_OI, known.dtype)


def _shape(tensors: Sequence[torch.Tensor], codes: int) -> tuple[int, ...]:
    known = _known[codes]
    return tuple(tensors[0].shape) if known is None else known.shape_OI


@lru_cache(maxsize=256)
def _gemms(key: int, device: torch.device, dtype: torch.dtype, shape: torch.Size) -> LinearGemms:
    # native support depends on the sizes; without draws the layer's identity has no effect. The backward passes of
    # several devices run at once, each with the backends of its own
    return LinearGemms(recipe_of(key), LinearId(0, "compiled"), 0, AmaxHistory)


@torch.library.custom_op("megatron_lowprec::linear", mutates_args=())
def _linear(
    x: torch.Tensor, tensors: list[torch.Tensor], bias: torch.Tensor | None, key: int, codes: int
) -> torch.Tensor:
    weight = _weight(tensors, codes)
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        gemms = _gemms(key, x.device, weight.dtype, weight.shape)
        return gemms.forward(x, weight, NO_DRAWS, bias_O=bias)[0]


@torch.library.custom_op("megatron_lowprec::linear_backward", mutates_args=())
def _linear_backward(
    dy: torch.Tensor, x: torch.Tensor | None, tensors: list[torch.Tensor], key: int, codes: int, needed: list[bool]
) -> list[torch.Tensor]:
    """dx, dw and db; an empty tensor for each that is not needed."""
    weight, (input_grad, weight_grad, bias_grad) = _weight(tensors, codes), needed
    with torch.cuda.device_of(dy), torch.autocast(dy.device.type, enabled=False):
        linear_gemms = _gemms(key, dy.device, weight.dtype, weight.shape)
        linear_gemms.backends.resolve(weight)
        gemms = backward_gemms(input_grad, weight_grad)
        grad = linear_gemms.grad_output(dy, NO_DRAWS, bias=bias_grad, gemms=gemms)
        dx = linear_gemms.dgrad(grad, weight, NO_DRAWS) if input_grad else dy.new_empty(0)
        dw = dy.new_empty(0) if x is None or not weight_grad else linear_gemms.wgrad(grad, x, NO_DRAWS)
    return [dx, dw, dy.new_empty(0) if grad.bias is None else grad.bias]


@_linear.register_fake
def _(x: torch.Tensor, tensors: list[torch.Tensor], bias: torch.Tensor | None, key: int, codes: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], _shape(tensors, codes)[0])


@_linear_backward.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor | None, tensors: list[torch.Tensor], key: int, codes: int, needed: list[bool]
) -> list[torch.Tensor]:
    out_features, in_features = _shape(tensors, codes)
    sizes = (dy.shape[0], in_features), (out_features, in_features), (out_features,)
    return [dy.new_empty(size if is_needed else 0) for size, is_needed in zip(sizes, needed)]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, tensors, _, ctx.key, ctx.codes = inputs
    ctx.save_for_backward(x if ctx.codes == IN_MEMORY else None, *tensors)  # frozen codes have no wgrad


def _backward(ctx, dy):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():
        of_weight = "with a frozen weight as codes" if ctx.codes else f"under recipe {recipe_of(ctx.key).name}"
        refuse(f"a compiled layer {of_weight}", "create_graph=True")
    x, *tensors = ctx.saved_tensors
    needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
    needed = [needs_x, any(needs_w), needs_bias]
    grads = _linear_backward(dy.contiguous(), x, tensors, ctx.key, ctx.codes, needed)
    dx, dw, db = (grad if is_needed else None for grad, is_needed in zip(grads, needed))
    return dx, [dw] + [None] * (len(tensors) - 1), db, None, None


_linear.register_autograd(_backward, setup_context=_save)
