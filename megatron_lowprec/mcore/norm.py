"""LayerNorm and RMSNorm as Megatron-core builds them: fused on a GPU, torch's elsewhere, usable under sequence
parallelism.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.dispatch import fuses


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        from megatron_lowprec.kernels.layernorm.triton import norm

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, mean, rstd = norm(rows, weight, bias, eps)
        ctx.save_for_backward(rows, weight, mean, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        from megatron_lowprec.kernels.layernorm.triton import norm_backward

        rows, weight, mean, rstd = ctx.saved_tensors
        dx, dw, db = norm_backward(dy.reshape(rows.shape).contiguous(), rows, weight, mean, rstd)
        return dx.view(dy.shape), dw, db, None


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with a weight and a bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H] in the dtype of x."""
        return _NormFunction.apply(x, self.weight, self.bias, self.eps) if fuses(x) else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H] in the dtype of x."""
        return _NormFunction.apply(x, self.weight, None, self.eps) if fuses(x) else super().forward(x)


class Norm:
    """Builds a ``LayerNorm`` or an ``RMSNorm``, as ``config.normalization`` says.

    Megatron-core's own wrapper of torch's refuses sequence parallelism: its gradients would not be summed over the
    ranks. Marking the parameters ``sequence_parallel`` is all that ``finalize_model_grads`` needs to do so.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        if config.layernorm_zero_centered_gamma:
            raise UserError(
                "--apply-layernorm-1p needs TransformerEngine's norm, which this build does not use; leave it out"
            )
        kinds: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise UserError(f"--normalization {config.normalization} is not available; use LayerNorm or RMSNorm")
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=torch.float32)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm.to(config.params_dtype)
