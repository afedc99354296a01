"""Quantized weights that all microbatches of a step multiply with: made in the first one, kept for the others."""

from collections.abc import Iterable, Mapping

from megatron_lowprec.kernels.gemm.native import ScaledMatrix
from megatron_lowprec.linear.layer_tensors import GemmOperand
from megatron_lowprec.quantization.device_rng_step import capturing


class QuantizedWeightCache:
    """The weight's operands by GEMM, from when they are made until ``forget``.

    Args:
        gemms: those whose operand is the same for all microbatches of a step, and may stay in memory.

    Attributes:
        under_capture: keep and find operands also while a CUDA graph is captured. Whoever says so holds on to
            ``operands`` and replays a step's graphs in the order of their capture.
    """

    def __init__(self, gemms: Iterable[str]) -> None:
        self.under_capture = False
        self._gemms = frozenset(gemms)
        self._operands: dict[str, GemmOperand] = {}

    def keeps(self, gemm: str) -> bool:
        """Whether the weight's operand in this GEMM is one to ``keep``, and to ``find``."""
        return gemm in self._gemms and (self.under_capture or not capturing())

    def keep(self, made: Mapping[str, GemmOperand]) -> None:
        """Have these, by GEMM, for the microbatches that follow."""
        self._operands |= made

    def find(self, gemm: str, native: bool) -> GemmOperand | None:
        """What was kept for a native or an emulated product; None where that is to be made."""
        found = self._operands.get(gemm) if self.keeps(gemm) else None
        return found if isinstance(found, ScaledMatrix) == native else None

    def operands(self) -> list[GemmOperand]:
        """All that the step's later microbatches will find."""
        return list(self._operands.values())

    def forget(self) -> None:
        """Drop them: the weight has changed."""
        self._operands.clear()
