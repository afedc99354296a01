"""Transposes of matrices of one-byte codes, in plain torch."""

from collections.abc import Sequence

import torch


def transpose_codes(codes: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """Transpose [C, R padded] of codes [R, C], a copy of the same dtype, byte for byte.

    Args:
        codes: uint8 or an FP8 dtype, contiguous.
        multiple: R is padded with zero bytes to a multiple of this.
    """
    assert codes.is_contiguous()
    R, C = codes.shape
    transposed = codes.new_zeros((C, -(-R // multiple) * multiple), dtype=torch.uint8)
    transposed[:, :R] = codes.view(torch.uint8).t()
    return transposed.view(codes.dtype)


def transpose_groups(codes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Transposes [groups, C, R] of codes [R, C] of each group, one shape and dtype for all."""
    return torch.stack([transpose_codes(each).view(torch.uint8) for each in codes]).view(codes[0].dtype)
