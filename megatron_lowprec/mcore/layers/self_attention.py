"""Megatron-core's self-attention with fewer passes over queries, keys and values between linear_qkv and attention.

- linear_qkv has one output, so autograd concatenates three gradients to one matrix (4 bytes an entry), which the layer
  then casts to FP8. Here the cast reads the three tensors directly.
- Megatron-core rotates queries and keys by a dozen operations. Here a kernel does, with their bits.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp

from megatron_lowprec.kernels import dispatch
from megatron_lowprec.kernels.cast_fp8.prologue import QkvGrad
from megatron_lowprec.kernels.rope.reference import cos_and_sin
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


@once_differentiable("the fused rotary position embedding")
class _Rope(torch.autograd.Function):
    """Rotates queries and keys [s, b, groups, heads / groups, d] into [s, b, heads, d].

    Saves the angles, which all layers share, and computes cosines and sines again in the backward pass.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(angles)
        ctx.shapes = query.shape, key.shape
        turn = cos_and_sin(angles, query.dtype)
        return dispatch.rope(query, *turn), dispatch.rope(key, *turn)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        turn = cos_and_sin(ctx.saved_tensors[0], grads[0].dtype)
        of_inputs = []
        for grad, shape in zip(grads, ctx.shapes, strict=True):
            grad = grad if grad.stride(-1) == 1 else grad.contiguous()
            of_inputs.append(dispatch.rope_backward(grad, *turn).view(shape))
        return *of_inputs, None


class LowPrecSelfAttention(SelfAttention):
    """``SelfAttention``; casts linear_qkv's gradient from its three parts where the layer takes FP8 operands.

    Queries and keys are rotated by one kernel each for CUDA tensors, where rope is plain.
    """

    _angles: torch.Tensor | None = None  # of the call that runs, if this class rotates

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """As Megatron-core's."""
        angles = self._fused_angles(hidden_states, options)
        if angles is None:
            return super().forward(hidden_states, *args, **options)
        self._angles = angles
        try:
            return super().forward(hidden_states, *args, **options | {"rotary_pos_emb": None})
        finally:
            self._angles = None

    def _fused_angles(self, hidden_states: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
        """Angles [s, 1, 1, r] of both queries and keys if the kernel rotates as Megatron-core would, else None."""
        angles, config = options.get("rotary_pos_emb"), self.config
        if isinstance(angles, tuple):
            angles = angles[0] if angles[0] is angles[1] else None
        of_a_batch = any(
            options.get(name) is not None for name in ("packed_seq_params", "inference_context", "inference_params")
        )
        variants = ("rotary_interleaved", "no_rope_freq", "fused_single_qkv_rope", "yarn_rotary_scaling_factor")
        if angles is None or of_a_batch or any(getattr(config, name, None) for name in variants):
            return None
        plain = angles.dim() == 4 and angles.shape[1:3] == (1, 1) and angles.dtype == torch.float32
        return angles.contiguous() if plain and dispatch.fuses(hidden_states) else None

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        **options: Any,  # split_qkv; output_gate from Megatron-core 0.16 on
    ) -> Any:
        """As Megatron-core's; queries and keys are rotated if this class does it."""
        query, key, *others = self._query_key_value(hidden_states, key_value_states, **options)
        if self._angles is not None:
            # heads of a group are apart until here, so that no copy joins them
            query = query if query.dim() == 5 else query.unsqueeze(3)
            query, key = _Rope.apply(query, key.unsqueeze(3), self._angles)
            others[0] = others[0].contiguous()  # of values, the last view that would keep linear_qkv's output
        return query, key, *others

    @property
    def _normalizes(self) -> bool:
        """Whether queries or keys have a norm."""
        norms = self.q_layernorm, self.k_layernorm
        return any(norm is not None and not isinstance(norm, IdentityOp) for norm in norms)

    def _query_key_value(
        self, hidden_states: torch.Tensor, key_value_states: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, ...]:
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
        query = query.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        if self._angles is None or self._normalizes:
            query = query.flatten(2, 3)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        if self.config.test_mode:
            self.run_realtime_tests()
        return query, key, value
