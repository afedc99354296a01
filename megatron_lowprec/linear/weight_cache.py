"""Per-step cache of quantized weights: the first microbatch makes them, the others multiply with the same."""

from collections.abc import Iterable

from megatron_lowprec.quantization.device_rng_step import capturing
from megatron_lowprec.quantization.tensor import QuantizedTensor


class QuantizedWeightCache:
    """A layer's quantized weight by GEMM and backend, until ``clear``.

    Args:
        gemms: those whose weight is quantized alike for all microbatches of a step, and may stay in memory.

    Attributes:
        under_capture: use the cache also while a CUDA graph is captured. Its user keeps ``tensors`` alive and replays a
            step's graphs in the order of their capture.
    """

    def __init__(self, gemms: Iterable[str]) -> None:
        self.under_capture = False
        self._gemms = frozenset(gemms)
        self._weights: dict[tuple[str, bool], QuantizedTensor] = {}

    def holds(self, gemm: str) -> bool:
        """Whether this GEMM's weight is cached."""
        return gemm in self._gemms and (self.under_capture or not capturing())

    def put(self, gemm: str, native: bool, weight: QuantizedTensor) -> None:
        """Cache a weight for a native or an emulated GEMM."""
        self._weights[gemm, native] = weight

    def get(self, gemm: str, native: bool) -> QuantizedTensor | None:
        """The weight cached for a native or an emulated GEMM, or None."""
        return self._weights.get((gemm, native)) if self.holds(gemm) else None

    def tensors(self) -> list[QuantizedTensor]:
        """All cached weights."""
        return list(self._weights.values())

    def clear(self) -> None:
        """Drop them: the weight has changed."""
        self._weights.clear()
