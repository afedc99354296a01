"""Largest magnitudes; a NaN is above all numbers."""

import torch


def amax_along(magnitude: torch.Tensor, axis: int) -> torch.Tensor:
    """The largest entry along an axis, which is kept with size 1; entries are not negative."""
    return magnitude.amax(axis, keepdim=True)


def larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The larger of two entries, elementwise; neither is negative."""
    return torch.maximum(a, b)


def raise_to_amax(amax: torch.Tensor, x: torch.Tensor) -> None:
    """Raise fp32 ``amax`` [1], in place, to the amax of x [R, C]."""
    amax.copy_(larger(amax, x.abs().amax().float()))
