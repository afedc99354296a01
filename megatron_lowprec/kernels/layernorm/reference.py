"""LayerNorm (with a bias) and RMSNorm (without one) over the last dimension, in fp32 inside, and their gradients."""

from typing import NamedTuple

import torch


class Normalized(NamedTuple):
    """A norm's output and what its backward pass needs.

    Attributes:
        y: [T, H] in the dtype of x.
        mean: fp32 [T]; None for RMSNorm.
        rstd: fp32 [T], 1 / sqrt(variance + eps), or of the mean square for RMSNorm.
    """

    y: torch.Tensor
    mean: torch.Tensor | None
    rstd: torch.Tensor


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Normalized:
    """``(x - mean) * rstd * weight + bias``, rounded once; RMSNorm, without a mean, where ``bias`` is None.

    Args:
        x: [T, H].
        weight, bias: [H].
    """
    v = x.float()
    mean = None if bias is None else v.mean(1)
    centered = v if mean is None else v - mean[:, None]
    rstd = torch.rsqrt(centered.square().mean(1) + eps)
    y = centered * rstd[:, None] * weight.float()
    return Normalized((y if bias is None else y + bias.float()).to(x.dtype), mean, rstd)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of x [T, H], weight [H] and bias [H] (None for RMSNorm), each in its tensor's dtype, summed in fp32.

    Args:
        dy: [T, H].
        mean, rstd: of ``norm``.
        dresidual: [T, H], the gradient of x as a residual, past the norm; it is added to the rounded gradient of x.
    """
    g, v = dy.float(), x.float()
    x_hat = (v if mean is None else v - mean[:, None]) * rstd[:, None]
    wg = g * weight.float()
    dx = wg - x_hat * (x_hat * wg).mean(1, keepdim=True)
    if mean is not None:
        dx -= wg.mean(1, keepdim=True)
    dw = (g * x_hat).sum(0).to(weight.dtype)
    dx = (dx * rstd[:, None]).to(x.dtype)
    return dx if dresidual is None else dx + dresidual, dw, None if mean is None else g.sum(0).to(weight.dtype)
