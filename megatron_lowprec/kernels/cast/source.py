"""What a cast reads: a matrix, or one that another kernel would write and that is computed on the way instead.

The entries are those that ``kernels.gelu`` writes, rounded to the dtype of x as it rounds them, bit for bit: both use
the same functions, whose multiply-adds are spelled out. A cast of GELU along rows and columns then reads 2 bytes an
entry and writes 2, where GELU and cast by themselves move 8.
"""

from typing import Literal, NamedTuple

import torch

from megatron_lowprec.kernels.contract.native import ScaledOperand

Kind = Literal["matrix", "bias_gelu", "bias_gelu_grad"]
KINDS: dict[Kind, int] = {"matrix": 0, "bias_gelu": 1, "bias_gelu_grad": 2}


class Source(NamedTuple):
    """A matrix [T, N] and how its entries follow from tensors in memory.

    Attributes:
        kind: "matrix" is x itself; "bias_gelu" is ``gelu(x + bias)``; "bias_gelu_grad" is the gradient of GELU's
            argument, x being the gradient of its result and ``argument + bias`` where it was taken.
        x: bf16 or fp32, the last dimension contiguous.
        argument: as x, with the same strides.
        bias: [N].
    """

    kind: Kind
    x: torch.Tensor
    argument: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[T, N]"""
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.x.dtype

    def pointers(self) -> tuple[torch.Tensor, ...]:
        """All three tensors for a kernel; what the kind does not read is x."""
        return tuple(self.x if tensor is None else tensor for tensor in self[1:])

    def specialized_on(self) -> tuple[object, ...]:
        """What Triton tells apart in ``pointers`` and in the sizes."""
        N, stride = self.x.shape[1], self.x.stride(0)
        found: tuple[object, ...] = (N % 16 == 0, stride % 16 == 0, N == 1, stride == 1)
        for tensor in self[1:]:
            if tensor is not None:
                found += (tensor.dtype, tensor.data_ptr() % 16 == 0)
        return found


def source_of(x: torch.Tensor | Source) -> Source:
    """A matrix as it is in memory, or what it is already."""
    return x if isinstance(x, Source) else Source("matrix", x)


class Fp8Cast(NamedTuple):
    """What one read of [M, N] gave: operands along rows and columns, and fp32 sums over M in parts [parts, N]."""

    rows: ScaledOperand | None
    columns: ScaledOperand | None
    sums: torch.Tensor | None
