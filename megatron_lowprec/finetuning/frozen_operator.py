"""A layer of codes within ``torch.compile``: one opaque operator, which takes codes and scales.

A tensor subclass would be taken apart by the compiler, which does not see the codes as one weight. The operator is for
layers without random draws and amax histories; it is a pure function of x, codes and bias, with eager bits.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.once_differentiable import refuse
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.frozen_weight import FrozenWeight, StoredSpecs
from megatron_lowprec.quantization.random_stream import NO_DRAWS
from megatron_lowprec.recipe.schema import LinearRecipe


class FrozenOperands(NamedTuple):
    """What the operator knows beside its tensors.

    Attributes:
        recipe: what the layer runs, without draws and delayed scales.
        specs: of the weight.
        shape_OI: output and input features.
        dtype: of the GEMMs.
    """

    recipe: LinearRecipe
    specs: StoredSpecs
    shape_OI: tuple[int, ...]  # noqa: N815 - a shape suffix
    dtype: torch.dtype

    def weight(self, tensors: Sequence[torch.Tensor]) -> FrozenWeight:
        """The weight [O, I] of its tensors."""
        return FrozenWeight(self.specs, tensors, self.shape_OI, self.dtype)


_known: list[FrozenOperands] = []


def operator_key(operands: FrozenOperands) -> int:
    """The argument of ``frozen_linear`` that names these operands within this process."""
    if operands not in _known:
        _known.append(operands)
    return _known.index(operands)


def frozen_linear(
    x_TI: torch.Tensor, tensors: list[torch.Tensor], bias_O: torch.Tensor | None, key: int
) -> torch.Tensor:
    """y_TO of a layer of codes as one operator with a backward pass; ``key`` of ``operator_key``."""
    y: torch.Tensor = _linear(x_TI, tensors, bias_O, key)
    return y


@lru_cache(maxsize=256)
def _gemms(key: int, device: torch.device) -> LinearGemms:
    # the backward passes of several devices run at once, each with the backends of its own
    return LinearGemms(_known[key].recipe, LinearId(0, "compiled"), 0, AmaxHistory)


@torch.library.custom_op("megatron_lowprec::frozen_linear", mutates_args=())
def _linear(x: torch.Tensor, tensors: list[torch.Tensor], bias: torch.Tensor | None, key: int) -> torch.Tensor:
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        return _gemms(key, x.device).forward(x, _known[key].weight(tensors), NO_DRAWS, bias_O=bias)[0]


@torch.library.custom_op("megatron_lowprec::frozen_linear_backward", mutates_args=())
def _linear_backward(
    dy: torch.Tensor, tensors: list[torch.Tensor], key: int, input_grad: bool, bias_grad: bool
) -> list[torch.Tensor]:
    """dx and db; an empty tensor for each that is not needed."""
    linear_gemms, weight = _gemms(key, dy.device), _known[key].weight(tensors)
    with torch.cuda.device_of(dy), torch.autocast(dy.device.type, enabled=False):
        linear_gemms.backends.resolve(weight)
        grad = linear_gemms.grad_output(dy, NO_DRAWS, bias=bias_grad, gemms=("dgrad",) if input_grad else ())
        dx = linear_gemms.dgrad(grad, weight, NO_DRAWS) if input_grad else dy.new_empty(0)
    return [dx, dy.new_empty(0) if grad.bias is None else grad.bias]


@_linear.register_fake
def _(x: torch.Tensor, tensors: list[torch.Tensor], bias: torch.Tensor | None, key: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], _known[key].shape_OI[0])


@_linear_backward.register_fake
def _(dy: torch.Tensor, tensors: list[torch.Tensor], key: int, input_grad: bool, bias_grad: bool) -> list[torch.Tensor]:
    out_features, in_features = _known[key].shape_OI
    dx = dy.new_empty(dy.shape[0], in_features) if input_grad else dy.new_empty(0)
    return [dx, dy.new_empty(out_features if bias_grad else 0)]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, tensors, _, ctx.key = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():
        refuse("a compiled layer with a frozen weight as codes", "create_graph=True")
    tensors = list(ctx.saved_tensors)
    needs_x, _, needs_bias, _ = ctx.needs_input_grad
    dx, db = _linear_backward(dy.contiguous(), tensors, ctx.key, needs_x, needs_bias)
    return dx if needs_x else None, [None] * len(tensors), db if needs_bias else None, None


_linear.register_autograd(_backward, setup_context=_save)
