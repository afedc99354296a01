"""Protocol of a backend for all experts of a layer, and the operands that it multiplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_lowprec.kernels.matrices import Matrices
from megatron_lowprec.kernels.mx_gemm.operand import MxOperand
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.backends.resolved import LayerBackends
from megatron_lowprec.linear.backends.table import ROWS
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor


class GroupOperand(NamedTuple):
    """Operand of a GEMM of all experts, in the layout of the backend's kernels.

    Attributes:
        data: of x or dy one matrix of all experts' rows, as the backend pads them; of weights one matrix an expert.
            ``blackwell_mx`` has types of its own.
        scale: decode scales; None if multiplied into the data, or for an unquantized operand. Emulated operands have
            those of the experts' tensors, fp32 [experts], or None.
    """

    data: torch.Tensor | Sequence[torch.Tensor] | Sequence[QuantizedTensor | None] | MxOperand
    scale: torch.Tensor | None = None


class GroupOperands(NamedTuple):
    """A matrix of all experts in the directions that were requested."""

    rowwise: GroupOperand | None = None
    columnwise: GroupOperand | None = None


class GroupedBackend(ABC):
    """GEMMs of a layer's experts by kernels on a GPU: ``GemmBackend`` for tokens that are sorted by expert.

    Args:
        experts: each expert's backends; their layers are equal but for keys and histories.
        name: of the row in ``BACKENDS``, to which the experts' own backends belong.
    """

    def __init__(self, experts: Sequence[LayerBackends], name: str) -> None:
        self._experts, self.name, self._recipe = experts, name, experts[0].context.recipe
        self._slots: dict[str, list[tuple[AmaxHistory, int]]] = {}

    def _histories(self, tensor: str) -> list[tuple[AmaxHistory, int]]:
        """Each expert's amax history and slot of a tensor with delayed scales."""
        if tensor not in self._slots:
            self._slots[tensor] = [expert.context.layer_amax.histories[tensor] for expert in self._experts]
        return self._slots[tensor]

    @abstractmethod
    def why_not(self, gemm: str, weight: torch.Tensor) -> str | None:
        """Reason why the kernels do not run a GEMM that resolves to this backend, with a weight [O, I]; or None."""

    def fuses_directions(self, tensor: str) -> bool:
        """Whether one read of x or dy should quantize it for both GEMMs that use it."""
        return False

    @abstractmethod
    def quantize(
        self, tensor: str, matrix: torch.Tensor, tokens: Sequence[int], rng_step: RngStep, request: CastRequest
    ) -> GroupOperands:
        """x [T, I] or dy [T, O] of all experts, contiguous, ``tokens[i]`` rows of expert i. No sums and no codes."""

    @abstractmethod
    def from_codes(self, codes: QuantizedTensor, tokens: Sequence[int]) -> GroupOperand:
        """The rowwise operand of rowwise codes [T, K], with the bits of ``quantize``."""

    @abstractmethod
    def weights(self, gemm: str, weights: Matrices, rng_step: RngStep, update_amax: bool) -> GroupOperand:
        """Weights [O, I] of all experts for fprop (rowwise) or dgrad (columnwise)."""

    @abstractmethod
    def gemm(
        self, name: str, rows: GroupOperand, weights: GroupOperand, tokens: Sequence[int], out_dtype: torch.dtype
    ) -> torch.Tensor:
        """fprop ``x @ w.T`` or dgrad ``dy @ w`` of each expert's rows, [T, N]."""

    @abstractmethod
    def wgrad(
        self,
        dy: GroupOperand,
        x: GroupOperand,
        tokens: Sequence[int],
        totals: Sequence[torch.Tensor],
        overwrite: Sequence[bool],
    ) -> None:
        """Adds ``dy.T @ x`` of each expert's rows to its total [O, I], or overwrites it."""


def grouped_backend(name: str, experts: Sequence[LayerBackends]) -> GroupedBackend | None:
    """The backend of a row for the experts of a layer; None if the row runs them one after the other."""
    kind = ROWS[name].grouped
    found: GroupedBackend | None = None if kind is None else ROWS[name].load(kind)(experts, name)
    return found
