"""Fused bias + dropout + residual after a layer's attention and MLP: one kernel each for forward and backward."""

from collections.abc import Callable
from dataclasses import replace

import torch
from megatron.core.fusions import fused_bias_dropout

from megatron_lowprec.kernels import dispatch
from megatron_lowprec.kernels.cast_fp8.prologue import DropoutGrad, Matrix
from megatron_lowprec.kernels.dropout.reference import threshold
from megatron_lowprec.linear.layer_tensors import GradOutput
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.fusion import GradOutputChannel, attach_metadata, cached_amax, cached_residual

WithBias = tuple[torch.Tensor, torch.Tensor | None]
BiasDropoutAdd = Callable[[WithBias, torch.Tensor, float], torch.Tensor]


@once_differentiable("the fused bias, dropout and residual")
class _BiasDropoutAddFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        p: float,
        channel: GradOutputChannel | None,
    ) -> torch.Tensor:
        ctx.p, ctx.bias_dtype, ctx.key, ctx.channel = p, None if bias is None else bias.dtype, None, channel
        if p > 0.0:
            # From the generator that Megatron-core selects here: the same on ranks with the same tokens, and the same
            # when a checkpointed forward pass is recomputed.
            ctx.key = torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, device=x.device)
        rows = (t.reshape(-1, t.shape[-1]).contiguous() for t in (x, residual))
        first, second = rows
        return dispatch.bias_dropout_add(first, bias, second, p, ctx.key).view(x.shape)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        rows = dout.reshape(-1, dout.shape[-1]).contiguous()
        if ctx.channel is None:
            dx, dbias = dispatch.bias_dropout_add_backward(rows, ctx.p, ctx.key, ctx.bias_dtype)
        else:
            known = cached_amax(dout) if _passes_on(ctx.p, ctx.bias_dtype is not None, ctx.channel) else None
            grad = _grad_output(ctx.channel, rows, ctx.p, ctx.key, ctx.bias_dtype, known)
            dx, dbias = ctx.channel.put(replace(grad, bias=None)), grad.bias
        return dx.view(dout.shape), dbias, dout, None, None


def _passes_on(p: float, bias: bool, channel: GradOutputChannel | None) -> bool:
    """Whether the gradient of x is the output's, and its cast takes an amax."""
    return channel is not None and channel.fusion == "amax" and not bias and threshold(p) == 0


def _grad_output(
    channel: GradOutputChannel,
    dout: torch.Tensor,
    p: float,
    key: torch.Tensor | None,
    bias_dtype: torch.dtype | None,
    known: torch.Tensor | None,
) -> GradOutput:
    """The gradient of x as operands of the layer that computed x, with the bias gradient; dout is [T, H].

    ``known``: the amax of dout, if x has this gradient and the producer of dout attached it.
    """
    linear_gemms, rng_step = channel.linear_gemms, channel.rng_step
    if channel.fusion == "source":
        computed = Matrix(dout) if key is None else DropoutGrad(dout, key, p)
        return linear_gemms.grad_output(computed, rng_step, bias=bias_dtype is not None, shard=channel.shard)
    if known is not None:
        return linear_gemms.grad_output(dout, rng_step, amax=known)
    amax = torch.zeros(1, dtype=torch.float32, device=dout.device)
    dx, dbias = dispatch.bias_dropout_add_backward(dout, p, key, bias_dtype, amax)
    return replace(linear_gemms.grad_output(dx, rng_step, amax=amax), bias=dbias)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Megatron-core's function of this name, set in a layer's spec; in training, the result is fused on a GPU."""
    stock: BiasDropoutAdd = fused_bias_dropout.get_bias_dropout_add(training, fused)
    if not training or not fused:
        return stock

    def bias_dropout_add(x_with_bias: WithBias, residual: torch.Tensor, prob: float) -> torch.Tensor:
        x, bias = x_with_bias
        if not dispatch.fuses(x) or residual.dtype != x.dtype or residual.shape != x.shape:
            return stock(x_with_bias, residual, prob)
        # the fused bias gradient has the dtype of x
        channel = GradOutputChannel.of(x) if bias is None or bias.dtype == x.dtype else None
        out: torch.Tensor = _BiasDropoutAddFunction.apply(x, bias, cached_residual(residual), prob, channel)
        if _passes_on(prob, bias is not None, channel):
            attach_metadata(out, observes_grad=True)
        return out

    return bias_dropout_add
