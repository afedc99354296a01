"""Prologues of a cast: the source is a matrix in memory, or the output of an op fused into the cast.

Fused entries equal those that ``kernels.gelu``, ``kernels.swiglu``, ``kernels.dropout`` and ``kernels.layernorm``
write, bit for bit, rounded to the first tensor's dtype: both use the same functions, with explicit multiply-adds. A
cast of GELU, of dropout's gradient or of a norm, rowwise and columnwise, then reads 2 bytes an entry and writes 2.
Separate kernels move 8. SwiGLU then reads 4 and writes 2 instead of moving 10. Gradients of queries, keys
and values are cast without concatenation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from megatron_lowprec.kernels.dropout.reference import keep_scale, threshold

Kind = Literal[
    "matrix", "bias_gelu", "bias_gelu_grad", "dropout_grad", "layernorm", "rmsnorm", "qkv_grad", "swiglu", "swiglu_grad"
]
KINDS: dict[Kind, int] = {
    "matrix": 0,
    "bias_gelu": 1,
    "bias_gelu_grad": 2,
    "dropout_grad": 3,
    "layernorm": 4,
    "rmsnorm": 5,
    "qkv_grad": 6,
    "swiglu": 7,
    "swiglu_grad": 8,
}

KernelTensors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class CastPrologue(ABC):
    """A matrix [T, N], bf16 or fp32, computed from tensors in memory whose last dimension is contiguous.

    Attributes:
        kind: a key of KINDS.
    """

    __slots__ = ()
    kind: ClassVar[Kind]

    @abstractmethod
    def tensors(self) -> KernelTensors:
        """Tensors in the kernel's argument order; the first one has the matrix's dtype, device and row stride."""

    @property
    def x(self) -> torch.Tensor:
        """The first of ``tensors``."""
        return self.tensors()[0]

    @property
    def shape(self) -> torch.Size:
        """[T, N]"""
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        return self.x.dtype

    @property
    def in_memory(self) -> tuple[torch.Tensor, ...]:
        """Tensors that hold the matrix's entries; empty for a computed matrix."""
        return ()

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the matrix's shape, dtype and device, with other entries."""
        return self.x

    @property
    def dropout_p(self) -> float:
        """Dropout probability for a dropout's gradient; else 0."""
        return 0.0

    @property
    def head_widths(self) -> tuple[int, int]:
        """Columns of a group in dq, and in dk or dv; zeros except for ``QkvGrad``."""
        return (0, 0)

    def arguments(self) -> tuple[torch.Tensor | int | float, ...]:
        """Kernel arguments: four tensors, the first one in unused positions, then dropout's threshold and scale."""
        first, *others = self.tensors()
        p = self.dropout_p
        return first, *(first if tensor is None else tensor for tensor in others), threshold(p), keep_scale(p)

    def specialized_on(self) -> tuple[object, ...]:
        """Properties on which Triton specializes ``arguments`` and sizes."""
        tensors = self.tensors()
        N, stride = self.shape[1], tensors[0].stride(0)
        found: tuple[object, ...] = (N % 16 == 0, stride % 16 == 0, N == 1, stride == 1)
        for tensor in tensors:
            if tensor is not None:
                found += (tensor.dtype, tensor.data_ptr() % 16 == 0)
        return found


@dataclass(slots=True, eq=False)
class Matrix(CastPrologue):
    """A matrix [T, N] in memory."""

    matrix: torch.Tensor
    kind: ClassVar[Kind] = "matrix"
    head_widths: ClassVar[tuple[int, int]] = (0, 0)

    def tensors(self) -> KernelTensors:
        return self.matrix, None, None, None

    # the general ones would cost the host more than the launch of a cast
    def arguments(self) -> tuple[torch.Tensor | int | float, ...]:
        """As ``CastPrologue``: no dropout."""
        return self.matrix, self.matrix, self.matrix, self.matrix, 0, 1.0

    def specialized_on(self) -> tuple[object, ...]:
        """As ``CastPrologue``."""
        return specialized_on_matrix(self.matrix)

    @property
    def in_memory(self) -> tuple[torch.Tensor, ...]:
        return (self.matrix,)


@dataclass(slots=True, eq=False)
class BiasGelu(CastPrologue):
    """``gelu(y + bias)``, y [T, N], bias [N]."""

    y: torch.Tensor
    bias: torch.Tensor
    kind: ClassVar[Kind] = "bias_gelu"

    def tensors(self) -> KernelTensors:
        return self.y, None, self.bias, None


@dataclass(slots=True, eq=False)
class BiasGeluGrad(CastPrologue):
    """The gradient of y in ``gelu(y + bias)``; dout [T, N] is the output's gradient, y has the same strides."""

    dout: torch.Tensor
    y: torch.Tensor
    bias: torch.Tensor
    kind: ClassVar[Kind] = "bias_gelu_grad"

    def tensors(self) -> KernelTensors:
        return self.dout, self.y, self.bias, None


@dataclass(slots=True, eq=False)
class Swiglu(CastPrologue):
    """SwiGLU of h [T, 2F], contiguous, the gate's columns first; [T, F]."""

    h: torch.Tensor
    kind: ClassVar[Kind] = "swiglu"

    def tensors(self) -> KernelTensors:
        gate, up = self.h.chunk(2, -1)
        return gate, up, None, None


@dataclass(slots=True, eq=False)
class SwigluGrad(CastPrologue):
    """The gradient of h [T, 2F] in SwiGLU; dout [T, F] is the output's gradient; both contiguous."""

    dout: torch.Tensor
    h: torch.Tensor
    kind: ClassVar[Kind] = "swiglu_grad"

    def tensors(self) -> KernelTensors:
        return self.h, self.dout, None, None


@dataclass(slots=True, eq=False)
class DropoutGrad(CastPrologue):
    """The gradient of dropout's input; dout [T, N] is the output's gradient, ``key`` as in ``kernels.dropout``."""

    dout: torch.Tensor
    key: torch.Tensor
    p: float
    kind: ClassVar[Kind] = "dropout_grad"

    def tensors(self) -> KernelTensors:
        return self.dout, None, None, self.key

    @property
    def dropout_p(self) -> float:
        return self.p


@dataclass(slots=True, eq=False)
class LayerNormOutput(CastPrologue):
    """LayerNorm output; input [T, N], weight and bias [N], statistics of ``kernels.layernorm.statistics``."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    statistics: torch.Tensor
    kind: ClassVar[Kind] = "layernorm"

    def tensors(self) -> KernelTensors:
        return self.input, self.weight, self.bias, self.statistics


@dataclass(slots=True, eq=False)
class RMSNormOutput(CastPrologue):
    """RMSNorm output; input [T, N], weight [N], statistics of ``kernels.layernorm.statistics``."""

    input: torch.Tensor
    weight: torch.Tensor
    statistics: torch.Tensor
    kind: ClassVar[Kind] = "rmsnorm"

    def tensors(self) -> KernelTensors:
        return self.input, self.weight, None, self.statistics


def norm_output(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, statistics: torch.Tensor
) -> CastPrologue:
    """Prologue of the LayerNorm output of x [T, N]; of RMSNorm if ``bias`` is None."""
    if bias is None:
        return RMSNormOutput(x, weight, statistics)
    return LayerNormOutput(x, weight, bias, statistics)


@dataclass(slots=True, eq=False)
class QkvGrad(CastPrologue):
    """The gradient of linear_qkv's output; each group has columns of dq, dk and dv in this order.

    Attributes:
        dq: [T, groups * widths[0]], contiguous.
        dk, dv: [T, groups * widths[1]], contiguous.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    widths: tuple[int, int]
    kind: ClassVar[Kind] = "qkv_grad"

    def __post_init__(self) -> None:
        assert all(part.is_contiguous() for part in self.in_memory), "parts are read as if contiguous"

    def tensors(self) -> KernelTensors:
        return self.dq, self.dk, self.dv, None

    @property
    def shape(self) -> torch.Size:
        query, key = self.widths
        return torch.Size((self.dq.shape[0], self.dq.shape[1] // query * (query + 2 * key)))

    @property
    def in_memory(self) -> tuple[torch.Tensor, ...]:
        return self.dq, self.dk, self.dv

    @property
    def like(self) -> torch.Tensor:
        return self.dq.new_empty(()).expand(self.shape)

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.widths


def specialized_on_matrix(x: torch.Tensor) -> tuple[object, ...]:
    """``specialized_on`` of ``Matrix(x)``."""
    N, stride = x.shape[1], x.stride(0)
    return N % 16 == 0, stride % 16 == 0, N == 1, stride == 1, x.dtype, x.data_ptr() % 16 == 0


def prologue_of(x: torch.Tensor | CastPrologue) -> CastPrologue:
    """x as a prologue: ``Matrix`` of a tensor, or the prologue itself."""
    return Matrix(x) if isinstance(x, torch.Tensor) else x
