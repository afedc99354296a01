"""Per-step cache of quantized weights: the first microbatch fills it, the others reuse it."""

from collections.abc import Iterable
from typing import Any

from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.device_rng_step import capturing
from megatron_lowprec.quantization.tensor import QuantizedTensor


class QuantizedWeightCache:
    """Quantized weights of a layer by GEMM and backend, until ``clear``.

    Args:
        gemms: GEMMs to cache; their weight must be quantized equally for all microbatches of a step.

    Attributes:
        under_capture: also use the cache during CUDA graph capture. The caller must keep ``tensors`` alive and replay a
            step's graphs in capture order.
    """

    def __init__(self, gemms: Iterable[str]) -> None:
        self.under_capture = False
        self._gemms = frozenset(gemms)
        self._weights: dict[str, tuple[bool, QuantizedTensor]] = {}
        self._groups: dict[str, Any] = {}

    def holds(self, gemm: str) -> bool:
        """Whether the cache covers this GEMM's weight."""
        return gemm in self._gemms and (self.under_capture or not capturing())

    def put(self, gemm: str, native: frozenset[str], weight: QuantizedTensor) -> None:
        """Cache a weight for a GEMM, native or emulated, where the cache covers it; with both directions for two."""
        both = weight.rowwise_data is not None and weight.columnwise_data is not None
        for name in SIDES["weight"] if both else (gemm,):
            if self.holds(name):
                self._weights[name] = name in native, weight

    def get(self, gemm: str, native: bool) -> QuantizedTensor | None:
        """The weight cached for a native or an emulated GEMM, or None."""
        found = self._weights.get(gemm) if self.holds(gemm) else None
        return None if found is None or found[0] != native else found[1]

    def put_group(self, gemm: str, weights: Any) -> None:
        """Cache the weights of all experts in the cache of the first, in the form of one grouped backend."""
        self._groups[gemm] = weights

    def get_group(self, gemm: str) -> Any:
        """The weights of ``put_group``, or None."""
        return self._groups.get(gemm) if self.holds(gemm) else None

    def tensors(self) -> list[QuantizedTensor]:
        """All cached weights but those of groups, whose layers no graph captures."""
        return [weight for _, weight in self._weights.values()]

    def clear(self) -> None:
        """Drop all weights, after the weight has changed."""
        self._weights.clear()
        self._groups.clear()
