"""Addition of a bias to each row of a matrix."""

import torch


def add_bias(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``y + bias``, each sum rounded once; y [T, O] and bias [O]. The kernel writes to y, which is used up."""
    return y + bias
