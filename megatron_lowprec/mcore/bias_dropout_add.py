"""What ends a layer's attention and MLP, bias + dropout + residual, in one kernel each way."""

from collections.abc import Callable

import torch
from megatron.core.fusions import fused_bias_dropout

from megatron_lowprec.kernels.dispatch import fuses

WithBias = tuple[torch.Tensor, torch.Tensor | None]
BiasDropoutAdd = Callable[[WithBias, torch.Tensor, float], torch.Tensor]


class _BiasDropoutAddFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float
    ) -> torch.Tensor:
        from megatron_lowprec.kernels.dropout.triton import bias_dropout_add

        ctx.p, ctx.bias_dtype, ctx.key = p, None if bias is None else bias.dtype, None
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
        dx, dbias = bias_dropout_add_backward(rows, ctx.p, ctx.key, ctx.bias_dtype)
        return dx.view(dout.shape), dbias, dout, None


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Megatron-core's function of this name; in training, fused on a GPU. A layer takes it from its spec."""
    stock: BiasDropoutAdd = fused_bias_dropout.get_bias_dropout_add(training, fused)
    if not training or not fused:
        return stock

    def bias_dropout_add(x_with_bias: WithBias, residual: torch.Tensor, prob: float) -> torch.Tensor:
        x, bias = x_with_bias
        if not fuses(x) or residual.dtype != x.dtype or residual.shape != x.shape:
            return stock(x_with_bias, residual, prob)
        return _BiasDropoutAddFunction.apply(x, bias, residual, prob)

    return bias_dropout_add
