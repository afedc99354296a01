"""What a cast reads: a matrix, or one that another kernel would write and that is computed on the way instead.

The entries are those that ``kernels.gelu``, ``kernels.dropout`` and ``kernels.layernorm`` write, rounded to the dtype
of x as they round them, bit for bit: both use the same functions, whose multiply-adds are spelled out. A cast of GELU,
of dropout's gradient or of a norm along rows and columns then reads 2 bytes an entry and writes 2, where that kernel
and the cast alone move 8. The gradients of queries, keys and values are cast without being joined in memory.
"""

from typing import Literal, NamedTuple

import torch

from megatron_lowprec.kernels.dropout.reference import keep_scale, threshold
from megatron_lowprec.kernels.gemm.native import ScaledOperand

Kind = Literal["matrix", "bias_gelu", "bias_gelu_grad", "dropout_grad", "layernorm", "rmsnorm", "qkv_grad"]
KINDS: dict[Kind, int] = {
    "matrix": 0,
    "bias_gelu": 1,
    "bias_gelu_grad": 2,
    "dropout_grad": 3,
    "layernorm": 4,
    "rmsnorm": 5,
    "qkv_grad": 6,
}


class Source(NamedTuple):
    """A matrix [T, N] and how its entries follow from tensors in memory; made by the functions below.

    Attributes:
        kind: of KINDS.
        x: bf16 or fp32, the last dimension contiguous.
        second, third, fourth: what else a kind reads.
        p: of dropout.
        widths: of a group's columns of dq, and of dk or dv; zeros but for "qkv_grad".
    """

    kind: Kind
    x: torch.Tensor
    second: torch.Tensor | None = None
    third: torch.Tensor | None = None
    fourth: torch.Tensor | None = None
    p: float = 0.0
    widths: tuple[int, int] = (0, 0)

    @staticmethod
    def matrix(x: torch.Tensor) -> "Source":
        """x [T, N] itself."""
        return Source("matrix", x)

    @staticmethod
    def bias_gelu(y: torch.Tensor, bias: torch.Tensor) -> "Source":
        """``gelu(y + bias)``, y [T, N], bias [N]."""
        return Source("bias_gelu", y, third=bias)

    @staticmethod
    def bias_gelu_grad(dout: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> "Source":
        """The gradient of y by that of ``gelu(y + bias)``, dout [T, N]; y with the same strides."""
        return Source("bias_gelu_grad", dout, y, bias)

    @staticmethod
    def dropout_grad(dout: torch.Tensor, key: torch.Tensor, p: float) -> "Source":
        """The gradient before dropout by the one behind it, dout [T, N]; ``key`` of ``kernels.dropout.reference``."""
        return Source("dropout_grad", dout, fourth=key, p=p)

    @staticmethod
    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, statistics: torch.Tensor) -> "Source":
        """A norm's output, x [T, N], weight and bias [N], no bias with RMSNorm; ``kernels.layernorm.statistics``."""
        return Source("rmsnorm" if bias is None else "layernorm", x, weight, bias, statistics)

    @staticmethod
    def qkv_grad(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, widths: tuple[int, int]) -> "Source":
        """The gradient of linear_qkv's output, whose columns are, group by group, those of dq, dk and dv.

        Args:
            dq: [T, groups * widths[0]], contiguous.
            dk, dv: [T, groups * widths[1]], contiguous.
        """
        assert all(part.is_contiguous() for part in (dq, dk, dv)), "parts are read as if contiguous"
        return Source("qkv_grad", dq, dk, dv, widths=widths)

    @property
    def shape(self) -> torch.Size:
        """[T, N]"""
        if self.kind == "qkv_grad":
            query, key = self.widths
            return torch.Size((self.x.shape[0], self.x.shape[1] // query * (query + 2 * key)))
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.x.dtype

    @property
    def in_memory(self) -> tuple[torch.Tensor, ...]:
        """Tensors whose entries are the matrix's; none where it is computed."""
        if self.kind == "qkv_grad":
            assert self.second is not None
            assert self.third is not None
            return self.x, self.second, self.third
        return (self.x,) if self.kind == "matrix" else ()

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the matrix's shape, dtype and device, not of its entries."""
        return self.x if self.shape == self.x.shape else self.x.new_empty(()).expand(self.shape)

    def arguments(self) -> tuple[torch.Tensor | int | float, ...]:
        """For a kernel: all four tensors, x where the kind does not read one, and dropout's two numbers."""
        tensors = (self.x if tensor is None else tensor for tensor in self._tensors())
        return *tensors, threshold(self.p), keep_scale(self.p)

    def specialized_on(self) -> tuple[object, ...]:
        """What Triton tells apart in ``arguments`` and in the sizes."""
        N, stride = self.shape[1], self.x.stride(0)
        found: tuple[object, ...] = (N % 16 == 0, stride % 16 == 0, N == 1, stride == 1)
        for tensor in self._tensors():
            if tensor is not None:
                found += (tensor.dtype, tensor.data_ptr() % 16 == 0)
        return found

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.x, self.second, self.third, self.fourth


def source_of(x: torch.Tensor | Source) -> Source:
    """A matrix as it is in memory, or what it is already."""
    return x if isinstance(x, Source) else Source.matrix(x)


class Fp8Cast(NamedTuple):
    """What one read of [M, N] gave: operands along rows and columns, and sums over M, [N] in the matrix's dtype."""

    rows: ScaledOperand | None
    columns: ScaledOperand | None
    sums: torch.Tensor | None
