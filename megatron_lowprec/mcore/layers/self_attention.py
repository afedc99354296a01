"""Megatron-core's self-attention with the gradients of queries, keys and values cast without concatenating them.

linear_qkv has one output, so autograd concatenates three gradients to one matrix (4 bytes an entry), which the layer
then casts to FP8. Here the cast reads the three tensors directly.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from megatron_lowprec.kernels.cast_fp8.prologue import QkvGrad
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.fusion import GradOutputChannel
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear


@once_differentiable("the fused cast of the gradients of queries, keys and values")
class _Split(torch.autograd.Function):
    """[..., groups, query + 2 * key] -> its three parts; the backward pass quantizes linear_qkv's operands."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, mixed: torch.Tensor, widths: list[int], channel: GradOutputChannel, bias: bool
    ) -> tuple[torch.Tensor, ...]:
        ctx.widths, ctx.channel, ctx.bias = (widths[0], widths[1]), channel, bias
        return mixed.split(widths, dim=-1)

    @staticmethod
    def backward(ctx, *parts):  # type: ignore[no-untyped-def]
        channel, (*tokens, groups, _) = ctx.channel, parts[0].shape
        dq, dk, dv = (part.flatten(-2).flatten(0, -2).contiguous() for part in parts)
        source = QkvGrad(dq, dk, dv, ctx.widths)
        grad = channel.linear_gemms.grad_output(source, channel.rng_step, bias=ctx.bias)
        return channel.put(grad).view(*tokens, groups, -1), None, None, None


class LowPrecSelfAttention(SelfAttention):
    """``SelfAttention``; casts linear_qkv's gradient from its three parts where the layer takes FP8 operands."""

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        **options: Any,  # split_qkv; output_gate from Megatron-core 0.16 on
    ) -> Any:
        """As Megatron-core's."""
        layer, channel = self.linear_qkv, None
        three_parts = options.get("split_qkv", True) and not options.get("output_gate", False)
        # with fewer groups than ranks the output is gathered and its gradient split
        if (
            three_parts
            and isinstance(layer, LowPrecColumnParallelLinear)
            and self.config.num_query_groups >= layer.tp_group.size()
        ):
            channel = layer.offer_grad_channel(hidden_states)
        if channel is None:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, **options)
        layer.channel = channel
        try:
            mixed, widths = super().get_query_key_value_tensors(hidden_states, key_value_states, split_qkv=False)
        finally:
            layer.channel = None
        query, key, value = _Split.apply(mixed, widths, channel, layer.bias is not None)
        query = query.reshape(*query.shape[:2], -1, self.hidden_size_per_attention_head)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        if self.config.test_mode:
            self.run_realtime_tests()
        return query, key, value
