"""Per-step cache of quantized weights: the first microbatch fills it, the others reuse it."""

from collections.abc import Iterable
from typing import Any

from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.device_rng_step import capturing
from megatron_lowprec.quantization.tensor import QuantizedTensor

_NONE = "", None


class QuantizedWeightCache:
    """Quantized weights of a layer by GEMM and backend, until ``clear``.

    Args:
        gemms: GEMMs to cache; their weight must be quantized equally for all microbatches of a step.

    Attributes:
        gemms: as given.
        under_capture: also use the cache during CUDA graph capture. The caller must keep ``tensors`` alive and replay a
            step's graphs in capture order.
    """

    def __init__(self, gemms: Iterable[str]) -> None:
        self.under_capture = False
        self.gemms = frozenset(gemms)
        self._weights: dict[str, tuple[str, QuantizedTensor]] = {}
        self._groups: dict[str, tuple[str, Any]] = {}

    def holds(self, gemm: str) -> bool:
        """Whether the cache covers this GEMM's weight."""
        return gemm in self.gemms and (self.under_capture or not capturing())

    def put(self, gemm: str, backend: str, weight: QuantizedTensor) -> None:
        """Cache a backend's operand for a GEMM, where the cache covers it; with both directions for two GEMMs."""
        both = weight.rowwise_data is not None and weight.columnwise_data is not None
        for name in SIDES["weight"] if both else (gemm,):
            if self.holds(name):
                self._weights[name] = backend, weight

    def get(self, gemm: str, backend: str) -> QuantizedTensor | None:
        """The weight cached for a GEMM on a backend, or None."""
        name, weight = self._weights.get(gemm, _NONE) if self.holds(gemm) else _NONE
        return weight if name == backend else None  # an expert without tokens falls back to another backend

    def put_group(self, gemm: str, backend: str, weights: Any) -> None:
        """Cache a grouped backend's operand of all experts, where the cache of the first covers the GEMM."""
        if self.holds(gemm):
            self._groups[gemm] = backend, weights

    def get_group(self, gemm: str, backend: str) -> Any:
        """The weights of ``put_group``, or None."""
        name, weights = self._groups.get(gemm, _NONE) if self.holds(gemm) else _NONE
        return weights if name == backend else None

    def tensors(self) -> list[QuantizedTensor]:
        """All cached weights but those of groups, whose layers no graph captures."""
        return [weight for _, weight in self._weights.values()]

    def clear(self) -> None:
        """Drop all weights, after the weight has changed."""
        self._weights.clear()
        self._groups.clear()
