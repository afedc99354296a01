"""Base of the backends that run a GEMM for all experts of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from megatron_lowprec.kernels.dispatch import fuses
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.recipe.schema import GEMM_OPERANDS


class GroupedBackend(ABC):
    """GEMMs of a layer's experts by kernels on a GPU.

    Args:
        experts: each expert's GEMMs; equal but for their keys and histories.
    """

    def __init__(self, experts: Sequence[LinearGemms]) -> None:
        self._experts = experts

    def gemms(self, weight: torch.Tensor) -> frozenset[str]:
        """GEMMs that the kernels run, with a weight [O, I]; dgrad and wgrad are among them only together."""
        if not fuses(weight):
            return frozenset()
        self._experts[0].choose_products(weight)
        found = {name for name in GEMM_OPERANDS if self._supports(name, weight)}
        return frozenset(found if found >= {"dgrad", "wgrad"} else found & {"fprop"})

    @abstractmethod
    def _supports(self, name: str, weight: torch.Tensor) -> bool:
        """Whether the kernels run a GEMM, with a weight [O, I] on a GPU, in bf16 or fp32."""
