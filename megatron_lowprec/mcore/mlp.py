"""Megatron-core's MLP with bias and GELU in one kernel, and the bias gradient summed where it is made."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowprec.kernels.dispatch import fuses


class _BiasGeluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        from megatron_lowprec.kernels.gelu.triton import bias_gelu

        rows = y.reshape(-1, y.shape[-1]).contiguous()
        ctx.save_for_backward(rows, bias)
        return bias_gelu(rows, bias).view(y.shape)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        from megatron_lowprec.kernels.gelu.triton import bias_gelu_backward

        rows, bias = ctx.saved_tensors
        dy, dbias = bias_gelu_backward(dout.reshape(rows.shape).contiguous(), rows, bias)
        return dy.view(dout.shape), dbias


class LowPrecMLP(MLP):
    """``MLP``; fused where Megatron-core's own bias and GELU would be compiled together and this is a GPU's tensor."""

    @classmethod
    def of(cls, submodules: MLPSubmodules) -> type["LowPrecMLP"]:
        """The class that a layer builds its MLP from, with nothing but a config.

        ``TransformerLayer`` knows by name the classes that it gives process groups to, and warns of any other in a
        ModuleSpec; of a plain class it makes nothing more than an object.
        """

        class Built(cls):  # type: ignore[misc,valid-type]
            def __init__(self, config: TransformerConfig) -> None:
                group = parallel_state.get_tensor_model_parallel_group()
                super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=group)

        return Built

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[s, b, h] -> [s, b, h] and the bias that is still to be added to it."""
        if per_token_scale is not None or not self._has_bias_and_gelu() or not fuses(hidden_states):
            return super().forward(hidden_states, per_token_scale, **kwargs)
        y, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(_BiasGeluFunction.apply(y, bias))

    def _has_bias_and_gelu(self) -> bool:
        config = self.config
        gelu = self.activation_func is F.gelu and not config.gated_linear_unit
        return gelu and config.bias_activation_fusion and config.add_bias_linear and not config.use_te_activation_func
