"""Rotary position embedding (arXiv 2104.09864) in Megatron-core's order of roundings, and its gradient.

Halves of the rotated columns turn together: ``x * cos + (-second half, first half) * sin``, where each product and the
sum are rounded to the dtype of x.
"""

import torch


def cos_and_sin(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``angles`` fp32 [s, 1, 1, r], radians, rounded to ``dtype``."""
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x rotated; [s, b, heads, d].

    Args:
        x: [s, b, groups, heads / groups, d]
        cos, sin: [s, 1, 1, r] of ``cos_and_sin``; r is even and at most d, other columns are copied.
    """
    x = x.flatten(2, 3)
    turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)


def rope_backward(dout: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gradient of x in ``rope``, with its heads in one dimension: of dout [s, b, heads, d], of the same shape."""
    turned, rest = dout.split((cos.shape[-1], dout.shape[-1] - cos.shape[-1]), -1)
    first, second = (turned * sin).chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((second, -first), -1), rest), -1)
