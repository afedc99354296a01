"""Largest magnitudes; NaN compares as the largest."""

import torch

from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.rule import Direction


def amax_along(magnitude: torch.Tensor, axis: int) -> torch.Tensor:
    """The largest entry along an axis, which gets size 1; entries must not be negative."""
    return magnitude.amax(axis, keepdim=True)


def larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise larger of two entries, which must not be negative."""
    return torch.maximum(a, b)


def raise_to_amax(amax: torch.Tensor, x: torch.Tensor) -> None:
    """Raise fp32 ``amax`` [1], in place, to the amax of x [R, C]."""
    amax.copy_(larger(amax, x.abs().amax().float()))


def operand_amaxes(
    x: torch.Tensor, *, rows: Direction | None, columns: Direction | None, rounds_transform: bool = False
) -> torch.Tensor:
    """fp32 [2]: amax of the operand x, and of the operand x.T, each behind its transform; 0 where not asked for.

    Args:
        x: [M, N] bf16 or fp32, the last dimension contiguous, zero-padded to whole groups of a transform. Both
            directions transform by as many signs, or one of them.
        rounds_transform: round transformed values to the dtype of x.
    """
    amaxes = torch.zeros(2, dtype=torch.float32, device=x.device)
    for i, (way, matrix) in enumerate(((rows, x), (columns, x.t()))):
        if way is None:
            continue
        if way.signs is not None:
            missing = -matrix.shape[1] % way.signs.numel()
            matrix = hadamard_transform(torch.nn.functional.pad(matrix, (0, missing)), way.signs.sign())
            matrix = matrix.to(x.dtype) if rounds_transform else matrix
        amaxes[i] = matrix.abs().amax()
    return amaxes
