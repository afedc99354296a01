"""Tensors passed between the producers of a linear layer's x and dy, its three GEMMs and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.dispatch import packed_cast, packed_decode
from megatron_lowprec.quantization.frozen_weight import FrozenWeight
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import HadamardSpec, QuantSpec

CastFusion = Literal["source", "amax", None]
"""Fusion of a cast with the producer of x or dy: the cast computes the tensor, or the producer computes its amax."""


class InputLayout(NamedTuple):
    """How ``SavedForBackward`` holds x.

    Attributes:
        shape: of the layer's input.
        spec: of the quantized x; None if x is unquantized.
        transform: that precedes the columnwise data; None for none.
        rowwise: x holds rowwise codes: of this rank's tokens, which ranks gather in the backward pass; of an expert's,
            which it got as codes; or packed ones, with a tensor scale, of ``QuantizedTensor.beside``.
    """

    shape: torch.Size
    spec: QuantSpec | None = None
    rowwise: bool = False
    transform: HadamardSpec | None = None


class SavedForBackward(NamedTuple):
    """x and w of a linear layer for its backward pass.

    A function gives ``tensors()`` to ``save_for_backward``, keeps ``layout``, and restores the value from both:
    ``SavedForBackward(*ctx.saved_tensors, layout=ctx.layout)``.

    Attributes:
        weight: [O, I].
        x: the layer's input [..., I], columnwise data of the quantized x, [I, T padded], or rowwise codes of this
            rank's tokens; None if the backward pass recomputes x or has no wgrad.
        x_scale: decode scale of the data; None if x is unquantized, or block scales are multiplied into the data.
        x_tensor_scale: decode scale of the tensor above block scales, or None.
        weight_amax: fp32 [1], for ``LinearGemms.dgrad``.
        input_amax: fp32 [1], for ``LinearGemms.wgrad``, of its operand; None if it finds it.
    """

    weight: torch.Tensor
    x: torch.Tensor | None
    x_scale: torch.Tensor | None
    x_tensor_scale: torch.Tensor | None
    weight_amax: torch.Tensor | None
    input_amax: torch.Tensor | None
    layout: InputLayout

    @staticmethod
    def of(
        weight: torch.Tensor,
        x: torch.Tensor | CastPrologue | QuantizedTensor,
        quantized: QuantizedTensor,
        weight_amax: torch.Tensor | None,
        input_amax: torch.Tensor | None = None,
    ) -> SavedForBackward:
        """Saves columnwise data of the quantized x or codes beside it if present, else x if it is in memory."""
        if quantized.columnwise_data is not None:
            layout = InputLayout(x.shape, quantized.spec, transform=quantized.columnwise_transform)
            scales = quantized.columnwise_scale, quantized.columnwise_tensor_scale
            return SavedForBackward(weight, quantized.columnwise_data, *scales, weight_amax, None, layout)
        if (codes := quantized.beside) is not None:
            scales = codes.rowwise_scale, codes.rowwise_tensor_scale
            layout = InputLayout(x.shape, codes.spec, rowwise=True)
            return SavedForBackward(weight, codes.rowwise_data, *scales, weight_amax, None, layout)
        in_memory = x if isinstance(x, torch.Tensor) else None
        return SavedForBackward(weight, in_memory, None, None, weight_amax, input_amax, InputLayout(x.shape))

    def with_codes(self, codes: QuantizedTensor) -> SavedForBackward:
        """Saves the rowwise codes of this rank's tokens in place of x; codes that move have no tensor scale."""
        layout = InputLayout(self.layout.shape, codes.spec, rowwise=True)
        data = self.weight, codes.rowwise_data, codes.rowwise_scale
        return SavedForBackward(*data, None, self.weight_amax, None, layout)

    def without_input(self) -> SavedForBackward:
        """For a layer whose backward pass recomputes x, or whose frozen weight has no wgrad."""
        return self._replace(x=None, x_scale=None, x_tensor_scale=None)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All fields but ``layout``, in order."""
        return self[:-1]

    def input(self) -> torch.Tensor | QuantizedTensor:
        """x [T, I] for ``LinearGemms.wgrad``."""
        assert self.x is not None
        shape, spec, rowwise, transform = self.layout
        if spec is None:
            return self.x.reshape(-1, self.x.shape[-1])
        if rowwise:
            tokens = torch.Size((self.x.shape[0], shape[-1]))
            codes = QuantizedTensor(tokens, self.weight.dtype, spec, self.x, self.x_scale)
            codes.rowwise_tensor_scale = self.x_tensor_scale
            return codes
        return QuantizedTensor(
            torch.Size((math.prod(shape[:-1]), shape[-1])),  # numel of a Size would fix tokens that are symbolic
            self.weight.dtype,
            spec,
            columnwise_data=self.x,
            columnwise_scale=self.x_scale,
            folded=self.x_scale is None,
            columnwise_tensor_scale=self.x_tensor_scale,
            columnwise_transform=transform,
        )


class CachedInput(NamedTuple):
    """Tensors saved for backward in place of a linear layer's input.

    Attributes:
        tensors: for ``save_for_backward``.
        restore: of the tensors, the x that wgrad takes, [T, I].
    """

    tensors: tuple[torch.Tensor, ...]
    restore: Callable[..., torch.Tensor]

    @staticmethod
    def of(x: torch.Tensor, fmt: Format) -> CachedInput:
        """Packed codes of x [..., I]."""
        packed = packed_cast(x.detach().reshape(-1, x.shape[-1]).contiguous(), fmt)
        return CachedInput(packed, partial(packed_decode, fmt=fmt, dtype=x.dtype))


@dataclass(frozen=True)
class GradOutput:
    """dy_TO of a layer for dgrad and wgrad.

    Attributes:
        matrix: dy; if both directions are quantized, any tensor of its shape and dtype.
        quantized: dy in the directions quantized so far, or None.
        bias: gradient of the bias [O], or None.
        update_amax: record the amaxes of delayed scaling in ``dgrad`` and ``wgrad``.
    """

    matrix: torch.Tensor
    quantized: QuantizedTensor | None = None
    bias: torch.Tensor | None = None
    update_amax: bool = True

    def without_matrix(self) -> GradOutput:
        """With NaN in place of dy once both directions are quantized, so that its memory is free."""
        quantized = self.quantized
        if quantized is None or quantized.rowwise_data is None or quantized.columnwise_data is None:
            return self
        return replace(self, matrix=self.matrix.new_full((), math.nan).expand(self.matrix.shape))


def backward_gemms(input_grad: bool, weight_grad: bool) -> frozenset[str]:
    """dgrad where the input needs a gradient, wgrad where the weight does."""
    return _BACKWARD_GEMMS[input_grad, weight_grad]


_BACKWARD_GEMMS = {
    (dgrad, wgrad): frozenset(["dgrad"] * dgrad + ["wgrad"] * wgrad)
    for dgrad in (False, True)
    for wgrad in (False, True)
}


def transposes(x: QuantizedTensor) -> bool:
    """Whether x has columnwise data, or rowwise ones whose transpose they are: one scale for the whole tensor."""
    return x.columnwise_data is not None or (x.spec is not None and x.spec.granularity == "tensor")


def in_memory(x: torch.Tensor | CastPrologue) -> torch.Tensor:
    """x as one tensor, a frozen weight as its value; AssertionError for a prologue that is not a plain matrix."""
    if isinstance(x, torch.Tensor):
        return x.value() if isinstance(x, FrozenWeight) else x
    assert x.kind == "matrix", f"{x.kind} is no matrix in memory: supported_fusion tells where one may be computed"
    return x.x
