"""What ends a block of a transformer layer: a bias is added, entries are dropped, the residual is added.

Entry (token, column) is dropped where its 16 bits of the stream in ``philox/reference.py``, under a key of its own and
at moment (0, 0), are below ``threshold(p)``; nothing but the key has to be kept for the backward pass.
"""

import torch

from megatron_lowprec.kernels.amax.reference import raise_to_amax
from megatron_lowprec.kernels.philox.reference import draw_bits

DRAWS = 1 << 16


def threshold(p: float) -> int:
    """How many of 65536 draws drop an entry: p to 8e-6, but never all."""
    return min(round(p * DRAWS), DRAWS - 1)


def keep_scale(p: float) -> float:
    """What an entry that is kept is multiplied with, so that nothing changes on average."""
    return DRAWS / (DRAWS - threshold(p))


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float, key: torch.Tensor | None
) -> torch.Tensor:
    """``residual + dropout(x + bias)``, rounded once to the dtype of x.

    Args:
        x, residual: [T, H].
        bias: [H] or None.
        p: probability to be dropped.
        key: int32 [2], two 32-bit words, on the device of x; None where p is 0.
    """
    v = x.float() if bias is None else x.float() + bias.float()
    return (residual.float() + v * _factors(x, p, key)).to(x.dtype)


def bias_dropout_add_backward(
    dout: torch.Tensor,
    p: float,
    key: torch.Tensor | None,
    bias_dtype: torch.dtype | None,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of x [T, H] and of the bias [H], summed in fp32 before any rounding; None where there is no bias.

    The residual's gradient is ``dout`` itself. An fp32 [1] ``amax`` is raised to that of x's gradient, NaN above all.
    """
    dx = dout.float() * _factors(dout, p, key)
    rounded = dx.to(dout.dtype)
    if amax is not None:
        raise_to_amax(amax, rounded)
    return rounded, None if bias_dtype is None else dx.sum(0).to(bias_dtype)


def _factors(x: torch.Tensor, p: float, key: torch.Tensor | None) -> torch.Tensor:
    if threshold(p) == 0 or key is None:
        return torch.ones((1, 1), device=x.device)
    k0, k1 = (int(word) & 0xFFFFFFFF for word in key.tolist())
    draws = draw_bits((k0, k1), (0, 0), *x.shape, device=x.device)
    return torch.where(draws < threshold(p), 0.0, keep_scale(p))
