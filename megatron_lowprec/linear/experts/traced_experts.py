"""A linear layer of all experts within ``torch.compile``: one operator forward, one backward.

The number of each expert's tokens is in a tensor, so that one graph serves all numbers. ``counted`` copies it to the
CPU for all layers and their backward passes, which then run ahead of the device. Operands of an expert have sizes that
follow its tokens, and are no tensors of the graph: the backward pass quantizes x again, with the same keys and amaxes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_lowprec.kernels.matrices import Matrices
from megatron_lowprec.linear.backends.traced import define, numbered, recipe_of
from megatron_lowprec.linear.compiled import always_saved, traced_pass
from megatron_lowprec.linear.experts.expert_linear import ExpertGemms, ExpertLinear
from megatron_lowprec.linear.grouped_gemms import SavedGroup
from megatron_lowprec.linear.layer_histories import LayerHistories
from megatron_lowprec.linear.layer_state import without_autocast
from megatron_lowprec.linear.layer_tensors import backward_gemms
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import NO_DRAWS, RngStep


@torch.compiler.allow_in_graph
def counted(counts: Tensor) -> Tensor:
    """``counts`` on the CPU, for ``traced_experts``: here the host waits for the device."""
    return always_saved(_counts_on_host, counts)


def traced_experts(layer: ExpertLinear, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``layer(x, counts.tolist())``, with zeros in rows beyond the counted ones.

    Args:
        layer: of ``weight``.
        weight: [experts, O, I].
        counts: int64 [experts], on the CPU.

    Raises:
        UserError: dtypes or features differ.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype != weight.dtype:
        layer.check_dtypes(x, weight.dtype)
    if x.shape[-1] != weight.shape[-1]:
        layer.refuse_features(x, weight.shape[-1])
    grad = torch.is_grad_enabled()
    y: Tensor = _traced(x, weight, counts, layer.recipe_key, layer.identity, grad, layer.training and grad)
    return y


@torch.compiler.allow_in_graph
def _traced(
    x: Tensor, weight: Tensor, counts: Tensor, key: int, identity: Tensor | None, grad: bool, update_amax: bool
) -> Tensor:
    y: Tensor = _TracedExpertsFunction.apply(x, weight, counts, traced_pass(identity, grad), key, update_amax)
    return y


@once_differentiable("compiled experts")
class _TracedExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts, at, key: int, update_amax: bool):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts, at)
        ctx.key, ctx.update_amax = key, update_amax
        return _expert_linear(x, weight, counts, at, key, update_amax)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        needed = ctx.needs_input_grad[:2]
        grads = _expert_linear_backward(dy, *ctx.saved_tensors, ctx.key, ctx.update_amax, *needed)
        return *(grad if is_needed else None for grad, is_needed in zip(grads, needed)), None, None, None, None


def _forward(x: Tensor, weight: Tensor, counts: Tensor, at: Tensor | None, key: int, update_amax: bool) -> Tensor:
    (gemms, rng_step), tokens = _pass(weight, at, key), counts.tolist()
    with torch.cuda.device_of(x), without_autocast(x):
        y, _ = gemms.group.forward(x[: sum(tokens)], tokens, weight, rng_step, update_amax)
    return _of_all_rows(y, x)


def _backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    counts: Tensor,
    at: Tensor | None,
    key: int,
    update_amax: bool,
    input_grad: bool,
    weight_grad: bool,
) -> list[Tensor]:
    """dx and dw; an empty tensor for each that is not needed."""
    (gemms, rng_step), tokens = _pass(weight, at, key), counts.tolist()
    rows = sum(tokens)
    saved = SavedGroup.of(dy[:0] if x is None else x[:rows], Matrices(weight))
    saved = saved if weight_grad else saved.without_input()
    dw = dy.new_empty(tuple(weight.shape) if weight_grad else 0)
    with torch.cuda.device_of(dy), without_autocast(dy):
        dx, _ = gemms.group.backward(
            *(dy[:rows], tokens, saved, rng_step, [None] * len(tokens), update_amax),
            gemms=backward_gemms(input_grad, weight_grad),
            out=dw if weight_grad else None,
        )
    return [dy.new_empty(0) if dx is None else _of_all_rows(dx, dy), dw]


def _pass(weight: Tensor, at: Tensor | None, key: int) -> tuple[ExpertGemms, RngStep]:
    if at is None:
        return _pure(key, weight.device, weight.dtype, tuple(weight.shape)), NO_DRAWS
    number, step, microbatch = at.tolist()
    return numbered(number), RngStep(step, microbatch)


@lru_cache(maxsize=64)
def _pure(key: int, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> ExpertGemms:
    """Of any layer of a recipe without draws and histories; native support depends on the weight."""
    gemms = LinearGemms(recipe_of(key), LinearId(0, "compiled"), 0, AmaxHistory)
    return ExpertGemms([gemms] * shape[0], LayerHistories(device))


def _of_all_rows(found: Tensor, like: Tensor) -> Tensor:
    left = like.shape[0] - found.shape[0]
    return torch.cat([found, found.new_zeros(left, found.shape[1])]) if left else found


def _fake_backward(dy: Tensor, x: Any, weight: Tensor, *others: Any) -> list[Tensor]:
    *_, input_grad, weight_grad = others
    dx = dy.new_empty(dy.shape[0], weight.shape[2]) if input_grad else dy.new_empty(0)
    return [dx, dy.new_empty(tuple(weight.shape) if weight_grad else 0)]


_counts_on_host = define(
    "counts_on_host",
    "(Tensor counts) -> Tensor",
    lambda counts: counts.to("cpu", copy=True),  # of memory of its own also there
    lambda counts: counts.new_empty(counts.shape, device="cpu"),
    "cudagraph_unsafe",
)
_expert_linear = define(
    "expert_linear",
    "(Tensor x, Tensor weight, Tensor counts, Tensor? at, int key, bool update_amax) -> Tensor",
    _forward,
    lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[1]),
    "cudagraph_unsafe",
)
_expert_linear_backward = define(
    "expert_linear_backward",
    "(Tensor dy, Tensor? x, Tensor weight, Tensor counts, Tensor? at, int key, bool update_amax, bool input_grad, "
    "bool weight_grad) -> Tensor[]",
    _backward,
    _fake_backward,
    "cudagraph_unsafe",
)
