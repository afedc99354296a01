"""A bias added to every row of a matrix, in place."""

import torch


def add_bias_(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``y + bias``, each sum rounded once, written over y [T, O] and returned; bias [O]."""
    return y.add_(bias)
