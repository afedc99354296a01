"""In-place addition of a bias to each row of a matrix."""

import torch


def add_bias_(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``y + bias``, each sum rounded once, written to y [T, O] and returned; bias [O]."""
    return y.add_(bias)
