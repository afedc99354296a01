"""SwiGLU without biases (arXiv 2002.05202), computed in fp32, and its gradient.

The input [T, 2F] has the gate's columns first. The output is ``gate * sigmoid(gate) * up``.
"""

import torch

from megatron_lowprec.kernels.amax.reference import raise_to_amax


def swiglu(h: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
    """SwiGLU of h [T, 2F], rounded once to the dtype of h; [T, F].

    ``amax``, fp32 [1], is raised to that of the result, NaN as the largest.
    """
    gate, up = h.float().chunk(2, -1)
    out = (gate * torch.sigmoid(gate) * up).to(h.dtype)
    if amax is not None:
        raise_to_amax(amax, out)
    return out


def swiglu_backward(dout: torch.Tensor, h: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Gradient of h [T, 2F] from that of the output, dout [T, F].

    ``amax``, fp32 [1], is raised to that of the result, NaN as the largest.
    """
    gate, up = h.float().chunk(2, -1)
    factor = torch.sigmoid(gate)
    active = gate * factor
    slope = factor + active * (1.0 - factor)
    dh = torch.cat((dout.float() * (up * slope), dout.float() * active), -1).to(h.dtype)
    if amax is not None:
        raise_to_amax(amax, dh)
    return dh
