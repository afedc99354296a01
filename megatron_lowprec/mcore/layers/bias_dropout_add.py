"""What ends a layer's attention and MLP, bias + dropout + residual, in one kernel each way."""

from collections.abc import Callable
from dataclasses import replace

import torch
from megatron.core.fusions import fused_bias_dropout

from megatron_lowprec.kernels.cast_fp8.source import Source
from megatron_lowprec.kernels.dispatch import fuses
from megatron_lowprec.linear.operands import GradOutput
from megatron_lowprec.mcore.made_operands import Handover
from megatron_lowprec.mcore.residual import residual_of

WithBias = tuple[torch.Tensor, torch.Tensor | None]
BiasDropoutAdd = Callable[[WithBias, torch.Tensor, float], torch.Tensor]


class _BiasDropoutAddFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        p: float,
        handover: Handover | None,
    ) -> torch.Tensor:
        from megatron_lowprec.kernels.dropout.triton import bias_dropout_add

        ctx.p, ctx.bias_dtype, ctx.key, ctx.handover = p, None if bias is None else bias.dtype, None, handover
        if p > 0.0:
            # From the generator that Megatron-core has chosen for this place: alike on the ranks that hold the same
            # tokens, and the same again when a checkpointed forward pass is repeated.
            ctx.key = torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, device=x.device)
        rows = (t.reshape(-1, t.shape[-1]).contiguous() for t in (x, residual))
        first, second = rows
        return bias_dropout_add(first, bias, second, p, ctx.key).view(x.shape)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        from megatron_lowprec.kernels.dropout.triton import bias_dropout_add_backward

        rows = dout.reshape(-1, dout.shape[-1]).contiguous()
        if ctx.handover is None:
            dx, dbias = bias_dropout_add_backward(rows, ctx.p, ctx.key, ctx.bias_dtype)
        else:
            made = _made(ctx.handover, rows, ctx.p, ctx.key, ctx.bias_dtype)
            dx, dbias = ctx.handover.give(replace(made, bias=None)), made.bias
        return dx.view(dout.shape), dbias, dout, None, None


def _made(
    handover: Handover, dout: torch.Tensor, p: float, key: torch.Tensor | None, bias_dtype: torch.dtype | None
) -> GradOutput:
    """The gradient of x as operands for the layer that made x, and that of the bias; dout [T, H] is the result's."""
    from megatron_lowprec.kernels.dropout.triton import bias_dropout_add_backward

    numerics, moment = handover.numerics, handover.moment
    if handover.wanted == "source":
        computed = Source.matrix(dout) if key is None else Source.dropout_grad(dout, key, p)
        return numerics.grad_output(computed, moment, bias=bias_dtype is not None)
    amax = torch.zeros(1, dtype=torch.float32, device=dout.device)
    dx, dbias = bias_dropout_add_backward(dout, p, key, bias_dtype, amax=amax)
    return replace(numerics.grad_output(dx, moment, amax=amax), bias=dbias)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Megatron-core's function of this name; in training, fused on a GPU. A layer takes it from its spec."""
    stock: BiasDropoutAdd = fused_bias_dropout.get_bias_dropout_add(training, fused)
    if not training or not fused:
        return stock

    def bias_dropout_add(x_with_bias: WithBias, residual: torch.Tensor, prob: float) -> torch.Tensor:
        x, bias = x_with_bias
        if not fuses(x) or residual.dtype != x.dtype or residual.shape != x.shape:
            return stock(x_with_bias, residual, prob)
        # the sums for a bias have the dtype of x
        handover = Handover.on(x) if bias is None or bias.dtype == x.dtype else None
        return _BiasDropoutAddFunction.apply(x, bias, residual_of(residual), prob, handover)

    return bias_dropout_add
