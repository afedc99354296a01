"""Reductions over the blocks of an operand [R, K], and scales of its blocks, in plain torch."""

import torch
from torch.nn.functional import pad


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude in each block: fp32 [ceil(R / rows), ceil(K / columns)]; a NaN in the block gives NaN."""
    rows, columns = block
    magnitude = pad(x.abs(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    down, across = magnitude.shape[0] // rows, magnitude.shape[1] // columns
    return magnitude.reshape(down, rows, across, columns).amax(dim=(1, 3)).to(torch.float32)


def scale_blocks(x: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """x [R, K] times the scale of each entry's block; a scale dimension of size 1 is broadcast."""
    rows, columns = x.shape
    if block[0] == 1 and scale.shape[1] > 1 and columns % block[1] == 0:
        return (x.reshape(rows, columns // block[1], block[1]) * scale.unsqueeze(-1)).reshape(rows, columns)
    for dim in (0, 1):
        if scale.shape[dim] > 1 and block[dim] > 1:
            scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, x.shape[dim])
    return x * scale


def block_sum(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Sum of each block: [ceil(R / rows), ceil(K / columns)] in the dtype of x; zeros fill partial blocks.

    Columns are added first, then rows, each by halves: x[i] + x[i + n/2], until one number is left. The order is fixed,
    so that the sum has equal bits on every device.
    """
    rows, columns = block
    x = pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    x = x.reshape(x.shape[0] // rows, rows, -1, columns)
    return _sum_by_halves(_sum_by_halves(x).transpose(1, 2))


def _sum_by_halves(x: torch.Tensor) -> torch.Tensor:
    while (length := x.shape[-1]) > 1:
        x = pad(x, (0, length % 2))
        first, second = x.chunk(2, dim=-1)
        x = first + second
    return x.squeeze(-1)
