"""What a cast reads: a matrix, or one that another kernel would write and that is computed on the way instead.

The entries are those that ``kernels.gelu``, ``kernels.dropout`` and ``kernels.layernorm`` write, rounded to the dtype
of x as they round them, bit for bit: both use the same functions, whose multiply-adds are spelled out. A cast of GELU,
of dropout's gradient or of a norm along rows and columns then reads 2 bytes an entry and writes 2, where that kernel
and the cast by themselves move 8.
"""

from typing import Literal, NamedTuple

import torch

from megatron_lowprec.kernels.contract.native import ScaledOperand
from megatron_lowprec.kernels.dropout.reference import keep_scale, threshold

Kind = Literal["matrix", "bias_gelu", "bias_gelu_grad", "dropout_grad"]
KINDS: dict[Kind, int] = {"matrix": 0, "bias_gelu": 1, "bias_gelu_grad": 2, "dropout_grad": 3}
NORM_KINDS = {"layernorm": 4, "rmsnorm": 5}


class Source(NamedTuple):
    """A matrix [T, N] and how its entries follow from tensors in memory.

    Attributes:
        kind: "matrix" is x itself; "bias_gelu" is ``gelu(x + bias)``; "bias_gelu_grad" is the gradient of GELU's
            argument, x being the gradient of its result and ``argument + bias`` where it was taken; "dropout_grad" is
            the gradient before dropout, x being the one behind it.
        x: bf16 or fp32, the last dimension contiguous.
        argument: as x, with the same strides.
        bias: [N].
        key, p: of ``kernels.dropout.reference``.
    """

    kind: Kind
    x: torch.Tensor
    argument: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    key: torch.Tensor | None = None
    p: float = 0.0

    @property
    def shape(self) -> torch.Size:
        """[T, N]"""
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.x.dtype

    def arguments(self) -> tuple[torch.Tensor | int | float, ...]:
        """For a kernel: all four tensors, x where the kind does not read one, and dropout's two numbers."""
        tensors = (self.x if tensor is None else tensor for tensor in self._tensors())
        return *tensors, threshold(self.p), keep_scale(self.p)

    def specialized_on(self) -> tuple[object, ...]:
        """What Triton tells apart in ``arguments`` and in the sizes."""
        N, stride = self.x.shape[1], self.x.stride(0)
        found: tuple[object, ...] = (N % 16 == 0, stride % 16 == 0, N == 1, stride == 1)
        for tensor in self._tensors():
            if tensor is not None:
                found += (tensor.dtype, tensor.data_ptr() % 16 == 0)
        return found

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.x, self.argument, self.bias, self.key


class NormSource(NamedTuple):
    """A norm's output [T, N], whose entries follow once a row was read: the cast writes its statistics, too.

    Attributes:
        x: the norm's input, bf16 or fp32, contiguous.
        weight, bias, eps: of ``kernels.layernorm.reference.norm``; no bias with RMSNorm.
        mean, rstd: fp32 [T] that the cast fills; no mean with RMSNorm.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    mean: torch.Tensor | None
    rstd: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> "NormSource":
        """With room for the statistics."""
        rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        return NormSource(x, weight, bias, eps, None if bias is None else torch.empty_like(rstd), rstd)

    @property
    def kind(self) -> str:
        """Of NORM_KINDS."""
        return "rmsnorm" if self.mean is None else "layernorm"

    @property
    def shape(self) -> torch.Size:
        """[T, N]"""
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the output."""
        return self.x.dtype


def source_of(x: torch.Tensor | Source) -> Source:
    """A matrix as it is in memory, or what it is already."""
    return x if isinstance(x, Source) else Source("matrix", x)


class Fp8Cast(NamedTuple):
    """What one read of [M, N] gave: operands along rows and columns, and fp32 sums over M in parts [parts, N]."""

    rows: ScaledOperand | None
    columns: ScaledOperand | None
    sums: torch.Tensor | None
