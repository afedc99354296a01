"""A check for NaN and Inf by one reduction."""

from __future__ import annotations

import torch


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Whether all values are finite, as a bool scalar on their device; True without values.

    The largest magnitude is NaN or Inf if a value is. ``values.isfinite()`` would allocate five bytes for each bf16
    value: the weights of a vocabulary of 128,256 then set the peak of a run.

    Args:
        values: floating point of 16 bits and more.
    """
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.linalg.vector_norm(values, torch.inf).isfinite()
