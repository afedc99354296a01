"""SwiGLU without biases (arXiv 2002.05202), computed in fp32, and its gradient, also that of weighted rows.

The input [T, 2F] has the gate's columns first. The output is ``gate * sigmoid(gate) * up``.
"""

import torch

from megatron_lowprec.kernels.amax.reference import raise_to_amax


def swiglu(h: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
    """SwiGLU of h [T, 2F], rounded once to the dtype of h; [T, F].

    ``amax``, fp32 [1], is raised to that of the result, NaN as the largest.
    """
    out = _unrounded(h).to(h.dtype)
    if amax is not None:
        raise_to_amax(amax, out)
    return out


def swiglu_backward(dout: torch.Tensor, h: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Gradient of h [T, 2F] from that of the output, dout [T, F].

    ``amax``, fp32 [1], is raised to that of the result, NaN as the largest.
    """
    dh = _gradient(dout.float(), h)
    if amax is not None:
        raise_to_amax(amax, dh)
    return dh


def weighted_swiglu_backward(
    dout: torch.Tensor, h: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of h [T, 2F], and of ``weights``, [T], from that of ``weights[:, None] * swiglu(h)``, dout [T, F].

    The first is rounded once to the dtype of h; the second is summed in fp32 and rounded to the dtype of ``weights``.
    """
    dweights = (_unrounded(h) * dout.float()).sum(-1)
    return _gradient(dout.float() * weights.float().unsqueeze(-1), h), dweights.to(weights.dtype)


def _unrounded(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.float().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def _gradient(dout: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    gate, up = h.float().chunk(2, -1)
    factor = torch.sigmoid(gate)
    active = gate * factor
    slope = factor + active * (1.0 - factor)
    return torch.cat((dout * (up * slope), dout * active), -1).to(h.dtype)
