"""MLPs with SwiGLU of their own: weighted, or with its input saved in a narrow format and its output recomputed.

The forward pass keeps its bits. With a saved input, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.3), SwiGLU's
gradient and the input of linear_fc2 for wgrad are computed from what is decoded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back, weighted_swiglu, weighted_swiglu_back
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels import dispatch
from megatron_lowprec.linear.layer_tensors import CachedInput
from megatron_lowprec.linear.once_differentiable import once_differentiable
from megatron_lowprec.mcore.fusion import attach_metadata


@once_differentiable("SwiGLU with a quantized input")
class _CachedSwiglu(torch.autograd.Function):
    """SwiGLU of h [T, 2F], times probabilities [T, 1] if given, with a gradient from the packed codes of h."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, h: torch.Tensor, probs: torch.Tensor | None, codes: torch.Tensor, scale: torch.Tensor, fmt: Format
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scale, probs)
        ctx.fmt, ctx.dtype = fmt, h.dtype
        return _activation(h, probs)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        codes, scale, probs = ctx.saved_tensors
        h = dispatch.packed_decode(codes, scale, ctx.fmt, ctx.dtype)
        dh, dprobs = (swiglu_back(dout, h), None) if probs is None else _weighted_gradients(dout, h, probs)
        return dh, dprobs, None, None, None


@once_differentiable("SwiGLU of experts")
class _WeightedSwiglu(torch.autograd.Function):
    """SwiGLU of h [T, 2F] times probabilities [T, 1]."""

    @staticmethod
    def forward(ctx, h: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, probs)
        return _activation(h, probs)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        return _weighted_gradients(dout, *ctx.saved_tensors)


def _weighted_gradients(dout: torch.Tensor, h: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of h [T, 2F] and probs [T, 1]: one kernel on a GPU, where the two of Megatron-core read h twice.

    Megatron-core's sum in fp64 for probabilities in fp64.
    """
    if not dispatch.fuses(h) or probs.dtype == torch.float64:
        gradients: tuple[torch.Tensor, torch.Tensor] = weighted_swiglu_back(dout, h, probs)
        return gradients
    dh, dprobs = dispatch.weighted_swiglu_backward(dout.contiguous(), h.contiguous(), probs.flatten().contiguous())
    return dh, dprobs.view_as(probs)


def expert_swiglu(h: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """SwiGLU of h [..., 2F] times probabilities [...], [..., F], with Megatron-core's bits.

    On a GPU its gradients differ from Megatron-core's by last bits.
    """
    output: torch.Tensor = _WeightedSwiglu.apply(h.reshape(-1, h.shape[-1]), probs.reshape(-1, 1))
    return output.view(*h.shape[:-1], output.shape[-1])


def _activation(h: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = swiglu(h) if probs is None else weighted_swiglu(h, probs)
    return output


def cached_swiglu(h: torch.Tensor, probs: torch.Tensor | None, fmt: Format) -> torch.Tensor:
    """SwiGLU of h [..., 2F] with its bits, times probabilities [...] if given; [..., F].

    Saves h in ``fmt`` for both backward passes: its own, and that of the linear layer that takes the output.
    """
    rows = h.reshape(-1, h.shape[-1])
    weights = None if probs is None else probs.reshape(-1, 1)
    codes, scale = dispatch.packed_cast(rows.detach().contiguous(), fmt)
    output: torch.Tensor = _CachedSwiglu.apply(rows, weights, codes, scale, fmt)
    output = output.view(*h.shape[:-1], output.shape[-1])
    dtype = h.dtype

    def restore(codes: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        return _activation(dispatch.packed_decode(codes, scale, fmt, dtype), weights)

    saved = (codes, scale) if weights is None else (codes, scale, weights.detach())
    attach_metadata(output, cached_input=CachedInput(saved, restore))
    return output


class CachedSwigluMLP(MLP):
    """``MLP``, with SwiGLU's input saved in a format; SwiGLU of an expert has a gradient of one kernel.

    Attributes:
        swiglu_format: the format; None for Megatron-core's activation.
    """

    swiglu_format: Format | None = None

    def has_swiglu(self) -> bool:
        """Whether the activation between both linear layers is SwiGLU, without variants."""
        config = self.config
        variants = ("activation_func_clamp_value", "glu_linear_offset")  # of some releases
        plain = not any(getattr(config, name, None) for name in variants)
        swiglu = self.activation_func is F.silu and config.gated_linear_unit
        return swiglu and plain and not config.use_te_activation_func

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``MLP``."""
        swiglu = self._own_swiglu(per_token_scale)
        if swiglu is None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        h, bias = self.linear_fc1(hidden_states)
        h = h if bias is None else h + bias
        output, bias = self.linear_fc2(swiglu(h, per_token_scale))
        if per_token_scale is not None and bias is not None:
            return output + (bias * per_token_scale.unsqueeze(-1)).to(output.dtype), None
        return output, bias

    def _own_swiglu(self, probs: torch.Tensor | None) -> Callable[..., torch.Tensor] | None:
        """SwiGLU as a function of its input and probabilities; None for Megatron-core's activation."""
        if not torch.is_grad_enabled():
            return None
        if self.swiglu_format is not None:
            return partial(cached_swiglu, fmt=self.swiglu_format)
        config = self.config
        fuses = config.bias_activation_fusion and not config.activation_func_fp8_input_store
        weighted = fuses and not config.add_bias_linear and self.has_swiglu()
        return expert_swiglu if weighted and probs is not None else None


class CachedSwigluSharedExperts(SharedExpertMLP, CachedSwigluMLP):
    """``SharedExpertMLP`` over ``CachedSwigluMLP``."""
