"""Values that pass between the producers of a linear layer's x and dy, its three GEMMs and autograd."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.gemm.native import ScaledMatrix
from megatron_lowprec.kernels.gemm.reference import Operand

GemmOperand = Operand | ScaledMatrix
"""One side of an emulated or of a native product."""

CastFusion = Literal["source", "amax", None]
"""What a producer of x or dy can do for the casts of it: leave the computation to them, or find the amax on the way."""


class Input(NamedTuple):
    """x_TI of a layer as operands, without the matrix itself.

    Attributes:
        like: a tensor of its shape and dtype.
        rows, columns: operands of fprop and wgrad.
    """

    like: torch.Tensor
    rows: ScaledMatrix
    columns: ScaledMatrix

    @property
    def shape(self) -> torch.Size:
        """[T, I]"""
        return self.like.shape


class SavedForBackward(NamedTuple):
    """What ``LinearGemms.forward`` saves for the backward pass.

    Attributes:
        input: wgrad's operand of x, [I, T padded]; x itself is then not needed. None where x is.
        weight_amax: fp32 [1], for ``dgrad``.
    """

    input: ScaledMatrix | None
    weight_amax: torch.Tensor | None

    def tensors(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Tensors for ``save_for_backward``: x or what takes its place, its scale, the weight's amax."""
        if self.input is None:
            return x, None, self.weight_amax
        return self.input.elements, self.input.scale, self.weight_amax

    @staticmethod
    def restored(elements: torch.Tensor, scale: torch.Tensor | None, granularity: str) -> torch.Tensor | ScaledMatrix:
        """x, or the operand of it."""
        return elements if scale is None else ScaledMatrix(elements, scale, granularity, elements.shape[0])

    @property
    def granularity(self) -> str:
        """Of the saved operand."""
        return "" if self.input is None else self.input.granularity


@dataclass(frozen=True)
class GradOutput:
    """dy_TO of a layer, the operands that were made of it already, by GEMM, and the gradient of a bias."""

    matrix: torch.Tensor
    operands: Mapping[str, GemmOperand]
    bias: torch.Tensor | None = None


def matrix_of(x: torch.Tensor | CastPrologue | Input, made: bool = False) -> torch.Tensor:
    """x in memory; of a computed one, whose operands are all ``made``, a tensor of its shape and dtype."""
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, Input):
        return x.like
    assert made or x.kind == "matrix", f"{x.kind} is no matrix in memory: ask supported_fusion first"
    return x.like
