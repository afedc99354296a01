"""Bias and GELU in its tanh form (arXiv 1606.08415), computed in fp32, and their gradients.

With u = sqrt(2/pi) (x + 0.044715 x^3), (1 + tanh u) / 2 is the logistic function of 2u. It needs one exponential
instead of a tanh, and is accurate where it is small.
"""

import math

import torch

from megatron_lowprec.kernels.amax.reference import raise_to_amax

SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
CUBIC = 0.044715
# Upper bound of x^2: beyond it the logistic function is 0 or 1, and its slope must be 0, not inf * 0.
MAX_SQUARE = 1e8


def bias_gelu(y: torch.Tensor, bias: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
    """``gelu(y + bias)``, rounded once to the dtype of y; y [T, F], bias [F].

    ``amax``, fp32 [1], is raised to that of the result, NaN as the largest.
    """
    x = y.float() + bias.float()
    out = (x * _gate(x)[0]).to(y.dtype)
    if amax is not None:
        raise_to_amax(amax, out)
    return out


def bias_gelu_backward(
    dout: torch.Tensor, y: torch.Tensor, bias: torch.Tensor, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of y [T, F] and of bias [F], the latter summed in fp32 before rounding.

    ``amax``, fp32 [1], is raised to that of y's gradient, NaN as the largest.
    """
    x = y.float() + bias.float()
    gate, square = _gate(x)
    slope = SLOPE * (1.0 + 3.0 * CUBIC * square)
    dy = dout.float() * (gate + x * gate * (1.0 - gate) * slope)
    rounded = dy.to(y.dtype)
    if amax is not None:
        raise_to_amax(amax, rounded)
    return rounded, dy.sum(0).to(bias.dtype)


def _gate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    square = x.square().clamp(max=MAX_SQUARE)
    return torch.sigmoid(SLOPE * x * (1.0 + CUBIC * square)), square
