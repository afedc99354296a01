"""Temporarily instruments layers; disables fusion while active."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin


class InstrumentedGemms:
    """A layer's GEMMs, for a subclass that inspects tensors; delegates everything else to the layer's own.

    Attributes:
        gathers: None: an inspected tensor is gathered in the compute dtype, with the same bits.
    """

    gathers: str | None = None

    def __init__(self, inner: LinearGemms) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def supported_fusion(self, tensor: str, matrix: torch.Tensor) -> None:
        """None: an inspected tensor must be in memory."""

    def accepts_split_input(self, matrix: torch.Tensor) -> bool:
        """False: an inspected tensor must be one tensor."""
        return False


@contextmanager
def instrumented(layer: LowPrecLinearMixin, linear_gemms: InstrumentedGemms) -> Iterator[None]:
    """Temporarily replace the layer's GEMMs by these."""
    own = layer.bound_gemms
    layer.linear_gemms = linear_gemms  # type: ignore[assignment]
    try:
        yield
    finally:
        layer.linear_gemms = own
