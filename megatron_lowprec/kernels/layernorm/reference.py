"""LayerNorm (with a bias) and RMSNorm (without) over the last dimension, computed in fp32, and their gradients."""

from typing import NamedTuple

import torch

from megatron_lowprec.kernels.amax.reference import raise_to_amax


class Normalized(NamedTuple):
    """A norm's output and the statistics for its backward pass.

    Attributes:
        y: [T, H] in the dtype of x.
        mean: fp32 [T]; None for RMSNorm.
        rstd: fp32 [T], 1 / sqrt(variance + eps), or of the mean square for RMSNorm.
    """

    y: torch.Tensor
    mean: torch.Tensor | None
    rstd: torch.Tensor


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, amax: torch.Tensor | None = None
) -> Normalized:
    """``(x - mean) * rstd * weight + bias``, rounded once; RMSNorm, without a mean, if ``bias`` is None.

    Args:
        x: [T, H].
        weight, bias: [H].
        amax: fp32 [1], raised to that of y, NaN as the largest.
    """
    found = statistics(x, eps, centered=bias is not None)
    y = normalize(x, weight, bias, found)
    if amax is not None:
        raise_to_amax(amax, y)
    return Normalized(y, None if bias is None else found[1], found[0])


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, statistics: torch.Tensor
) -> torch.Tensor:
    """y of ``norm`` from the result of ``statistics`` for the rows of x."""
    centered = x.float() if bias is None else x.float() - statistics[1][:, None]
    y = centered * statistics[0][:, None] * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def statistics(x: torch.Tensor, eps: float, centered: bool) -> torch.Tensor:
    """Statistics of each row of x as in ``norm``: fp32 [2, T], rstd and mean; [1, T], rstd, unless ``centered``."""
    v = x.float()
    mean = v.mean(1, keepdim=True) if centered else torch.zeros(())
    rstd = torch.rsqrt((v - mean).square().mean(1) + eps)
    return torch.stack((rstd, mean[:, 0])) if centered else rstd[None]


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dresidual: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of x [T, H], weight [H] and bias [H] (None for RMSNorm), each in its tensor's dtype, summed in fp32.

    Args:
        dy: [T, H].
        mean, rstd: of ``norm``.
        dresidual: [T, H], gradient of x from the residual branch; added to the rounded gradient of x.
        amax: fp32 [1], raised to that of the gradient of x, with the residual's; NaN as the largest.
    """
    g, v = dy.float(), x.float()
    x_hat = (v if mean is None else v - mean[:, None]) * rstd[:, None]
    wg = g * weight.float()
    dx = wg - x_hat * (x_hat * wg).mean(1, keepdim=True)
    if mean is not None:
        dx -= wg.mean(1, keepdim=True)
    dw = (g * x_hat).sum(0).to(weight.dtype)
    dx = (dx * rstd[:, None]).to(x.dtype)
    dx = dx if dresidual is None else dx + dresidual
    if amax is not None:
        raise_to_amax(amax, dx)
    return dx, dw, None if mean is None else g.sum(0).to(weight.dtype)
