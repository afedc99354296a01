"""Hadamard transform along the last dimension, with a fixed order of fp32 additions: equal bits on every device."""

import math

import torch


def hadamard_transform(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """``y = x diag(signs / sqrt(g)) H`` on contiguous groups of g = len(signs), H Sylvester's matrix in natural order.

    Each entry is multiplied by fl32(1/sqrt(g)) and its sign. Butterflies of stride g/2, ..., 2, 1 in fp32 follow. A
    matrix product could sum in another order, so a code at a rounding boundary would depend on the device.

    Args:
        x: [R, K], K a multiple of g.
        signs: [g] of +1 and -1, g a power of two.

    Returns:
        fp32 [R, K].
    """
    rows, columns = x.shape
    g = signs.numel()
    if columns % g:
        raise ValueError(f"{columns} columns are no multiple of the Hadamard block {g}")
    # [g, groups]: each butterfly then reads and writes long contiguous rows
    y = (x.to(torch.float32).reshape(-1, g) * (signs * (1.0 / math.sqrt(g)))).t().contiguous()
    stride = g // 2
    while stride > 0:
        pairs = y.reshape(g // (2 * stride), 2, stride, -1)
        even, odd = pairs[:, 0], pairs[:, 1]
        y = torch.stack((even + odd, even - odd), dim=1)
        stride //= 2
    return y.reshape(g, -1).t().reshape(rows, columns)
