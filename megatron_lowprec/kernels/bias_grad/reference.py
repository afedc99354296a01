"""Second stage of sums over rows, for gradients of biases and of norms' weights."""

import torch


def sum_partials(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 [k, P, N] summed over P and rounded once -> [k, N] of ``dtype``."""
    return partial.sum(1).to(dtype)
