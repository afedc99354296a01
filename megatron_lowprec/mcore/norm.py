"""LayerNorm and RMSNorm as Megatron-core builds them: fused on a GPU, torch's elsewhere, usable under sequence
parallelism.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.dispatch import fuses
from megatron_lowprec.mcore.amax_hint import note_amax


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, amax: torch.Tensor | None
    ) -> torch.Tensor:
        from megatron_lowprec.kernels.layernorm.triton import norm

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, mean, rstd = norm(rows, weight, bias, eps, amax)
        ctx.save_for_backward(rows, weight, mean, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        from megatron_lowprec.kernels.layernorm.triton import norm_backward

        rows, weight, mean, rstd = ctx.saved_tensors
        dx, dw, db = norm_backward(dy.reshape(rows.shape).contiguous(), rows, weight, mean, rstd)
        return dx.view(dy.shape), dw, db, None, None


def _fused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float | None, hints: bool
) -> torch.Tensor:
    """The norm by one kernel, its output's amax noted where ``hints``."""
    if not hints:
        return _NormFunction.apply(x, weight, bias, eps, None)
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    y = _NormFunction.apply(x, weight, bias, eps, amax)
    note_amax(y, amax)
    return y


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with a weight and a bias.

    Attributes:
        hints_amax: note the output's amax, which the next layer asks for; on a GPU.
    """

    hints_amax = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H] in the dtype of x."""
        return _fused(x, self.weight, self.bias, self.eps, self.hints_amax) if fuses(x) else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with a weight; ``hints_amax`` as ``LayerNorm``."""

    hints_amax = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H] in the dtype of x."""
        return _fused(x, self.weight, None, self.eps, self.hints_amax) if fuses(x) else super().forward(x)


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
