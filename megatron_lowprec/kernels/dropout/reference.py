"""Bias, dropout and residual addition at the end of a transformer sublayer.

Entry (token, column) is dropped if its 16 bits of the stream in ``philox/reference.py``, under the call's key and at
RNG step (0, 0), are below ``threshold(p)``. Only the key is saved for the backward pass.
"""

import torch

from megatron_lowprec.kernels.amax.reference import raise_to_amax
from megatron_lowprec.kernels.philox.reference import draw_bits

DRAWS = 1 << 16


def threshold(p: float) -> int:
    """Number of the 65536 draws that drop an entry: p with an error up to 8e-6, but at most 65535."""
    return min(round(p * DRAWS), DRAWS - 1)


def keep_scale(p: float) -> float:
    """Factor of the entries that are not dropped, which preserves the mean."""
    return DRAWS / (DRAWS - threshold(p))


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float, key: torch.Tensor | None
) -> torch.Tensor:
    """``residual + dropout(x + bias)``, rounded once to the dtype of x.

    Args:
        x, residual: [T, H].
        bias: [H] or None.
        p: dropout probability.
        key: int32 [2], two 32-bit words, on the device of x; None if p is 0.
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
    """Gradients of x [T, H] and of the bias [H], the latter summed in fp32 before rounding; None without a bias.

    The residual's gradient is ``dout``. ``amax``, fp32 [1], is raised to that of x's gradient, NaN as the largest.
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
