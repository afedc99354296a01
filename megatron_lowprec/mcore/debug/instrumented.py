"""Temporarily instruments layers; disables fusion while active."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from megatron_lowprec.linear.backends.protocol import CastRequest, GemmBackend, KnownAmax
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor

Inspection = Callable[[str, torch.Tensor, RngStep, QuantizedTensor], None]
"""Called with a tensor's name ("input", "weight" or "grad_output"), the tensor [M, N], and what it was quantized to."""


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


class _InspectedBackend:
    """A GEMM backend that shows each tensor to an inspection after its quantization; delegates everything else."""

    def __init__(self, inner: GemmBackend, inspect: Inspection) -> None:
        self._inner, self._inspect = inner, inspect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def saves_codes(self, x_TI: torch.Tensor) -> bool:
        """False: the inspection compares with x itself."""
        return False

    def quantize(
        self,
        tensor: str,
        matrix: torch.Tensor,
        rng_step: RngStep,
        request: CastRequest,
        amax: KnownAmax | None = None,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        quantized, sums = self._inner.quantize(tensor, matrix, rng_step, request, amax)
        self._inspect(tensor, matrix, rng_step, quantized)
        return quantized, sums


@contextmanager
def inspected_casts(linear_gemms: LinearGemms, inspect: Inspection) -> Iterator[None]:
    """Temporarily show every tensor that a layer's backends quantize to ``inspect``."""
    with linear_gemms.backends.wrapped(lambda backend: cast(GemmBackend, _InspectedBackend(backend, inspect))):
        yield
