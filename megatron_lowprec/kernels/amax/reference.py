"""Largest magnitudes; NaN compares as the largest."""

import torch


def amax_along(magnitude: torch.Tensor, axis: int) -> torch.Tensor:
    """The largest entry along an axis, which gets size 1; entries must not be negative."""
    return magnitude.amax(axis, keepdim=True)


def larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise larger of two entries, which must not be negative."""
    return torch.maximum(a, b)


def raise_to_amax(amax: torch.Tensor, x: torch.Tensor) -> None:
    """Raise fp32 ``amax`` [1], in place, to the amax of x [R, C]."""
    amax.copy_(larger(amax, x.abs().amax().float()))
