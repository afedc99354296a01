"""Side channels between the producer of a tensor and the linear layer that consumes it.

Megatron-core's modules pass plain tensors, and so does autograd. A producer may already hold what a consumer would
compute: an amax, quantized operands, a residual whose gradient it can add. It attaches these to the tensor as one
``TensorMetadata``. ``docs/design/fusion.md`` shows the writers and readers of each field.

A field is valid only for the tensor object and version it was attached at. A view, a copy or an in-place change drops
it. A dropped field costs one extra pass over the tensor, or the memory of a second copy, and changes no result.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lowprec.linear.layer_tensors import CachedInput, CastFusion, GradOutput
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.token_rows import split_rows

_ATTRIBUTE = "lowprec_metadata"


@dataclass(slots=True)
class TensorMetadata:
    """Metadata attached to a tensor by its producer.

    Attributes:
        version: version of the tensor that the fields describe.
        amax: fp32 [1]. Written by norms, read by the linear layer that casts the tensor.
        quantized_input: the tensor's operands and the only layer that may use them. The tensor is a placeholder.
        cached_input: packed codes of the tensor, which the linear layer that takes it saves for backward.
        grad_channel: channel through which the consumer of a layer's output returns its gradient.
        expert_channels: on the output of a rank's experts, through which the dispatcher returns dy as codes.
        observes_grad: the tensor's gradient is cast as it is, by its amax, which the norm behind may attach to it.
        residual: weak reference to a norm's input as the norm returns it.
        held_residual: on the norm's output, keeps ``residual`` of the norm's input alive.
    """

    version: int
    amax: torch.Tensor | None = None
    quantized_input: tuple[LinearGemms, QuantizedTensor] | None = None
    cached_input: CachedInput | None = None
    grad_channel: GradOutputChannel | None = None
    expert_channels: ExpertChannels | None = None
    observes_grad: bool = False
    residual: weakref.ref[torch.Tensor] | None = None
    held_residual: torch.Tensor | None = None


def get_metadata(x: torch.Tensor) -> TensorMetadata | None:
    """The metadata attached to x at its present version, or None."""
    found: TensorMetadata | None = getattr(x, _ATTRIBUTE, None)
    return found if found is not None and found.version == x._version else None


def attach_metadata(x: torch.Tensor, **fields: Any) -> None:
    """Set fields of x's metadata; fields of an earlier version of x are dropped."""
    found = get_metadata(x)
    if found is None:
        found = TensorMetadata(x._version)
        setattr(x, _ATTRIBUTE, found)
    for name, value in fields.items():
        setattr(found, name, value)


def cached_amax(x: torch.Tensor) -> torch.Tensor | None:
    """The amax of x, fp32 [1], if its producer attached it."""
    found = get_metadata(x)
    return None if found is None else found.amax


def attached_cache(x: torch.Tensor) -> CachedInput | None:
    """The ``CachedInput`` of x, if its producer attached it."""
    found = get_metadata(x)
    return None if found is None else found.cached_input


def placeholder_like(x: torch.Tensor) -> torch.Tensor:
    """NaN of the shape, dtype and device of x, in one element of memory: an accidental read fails loudly."""
    return x.new_full((), math.nan).expand(x.shape)


def attached_input(x: torch.Tensor, linear_gemms: LinearGemms) -> QuantizedTensor | None:
    """The quantized operands of x attached for this layer, or None."""
    found = get_metadata(x)
    layer, quantized = (None, None) if found is None or found.quantized_input is None else found.quantized_input
    return quantized if layer is linear_gemms else None


def attach_residual(x: torch.Tensor, y: torch.Tensor, residual: torch.Tensor) -> None:
    """Attach a norm's input as an output of the norm, so that the norm's backward pass adds both gradients of x.

    Autograd would add them in a separate kernel: a third of a norm's backward pass, twice a layer.

    Args:
        x: the norm's input. It holds only a weak reference: where x is a leaf (a recomputed layer's input, a pipeline
            stage's), the residual's graph holds x, and autograd's part of such a cycle is never freed.
        y: the norm's output; the residual lives as long as y.
        residual: x as the norm's function returns it; ignored without a backward pass.
    """
    if residual.requires_grad:
        attach_metadata(y, held_residual=residual)
        attach_metadata(x, residual=weakref.ref(residual))
    else:
        attach_metadata(x, residual=None)


def cached_residual(x: torch.Tensor) -> torch.Tensor:
    """The residual attached to x while the norm's output is alive, else x."""
    found = get_metadata(x)
    residual = None if found is None or found.residual is None else found.residual()
    return x if residual is None else residual


class GradOutputChannel:
    """Passes dy of one call of a linear layer, as ``GradOutput``, from the consumer of the layer's output to the layer.

    It is attached to the layer's output y. In the backward pass the consumer of y, if it is the only one, puts operands
    into the channel and returns a placeholder to autograd. If the channel is dropped, or the consumer puts nothing, dy
    is the gradient tensor as usual.

    Attributes:
        linear_gemms, rng_step: of the layer's call.
        fusion: fusion that the casts of dy support, "source" or "amax"; None if only the layer itself puts operands.
        shard: the consumer puts the codes of this rank's tokens, which the layer gathers.
    """

    def __init__(self, linear_gemms: LinearGemms, rng_step: RngStep, fusion: CastFusion, shard: bool = False) -> None:
        self.linear_gemms, self.rng_step, self.fusion, self.shard = linear_gemms, rng_step, fusion, shard
        self._pending: tuple[GradOutput | QuantizedTensor, torch.Tensor] | None = None

    def attach(self, y: torch.Tensor) -> None:
        """Attach the channel to the layer's output."""
        attach_metadata(y, grad_channel=self)

    @staticmethod
    def of(y: torch.Tensor) -> GradOutputChannel | None:
        """The channel attached to y, if y is unchanged."""
        found = get_metadata(y)
        return None if found is None else found.grad_channel

    def put(self, grad: GradOutput) -> torch.Tensor:
        """Store dy and return its placeholder for autograd; only the layer may receive it."""
        placeholder = placeholder_like(grad.matrix)
        self._pending = grad, placeholder
        return placeholder

    def get(self, dy: torch.Tensor) -> GradOutput | None:
        """The stored ``GradOutput`` if dy is its placeholder, in any shape; None if dy is a gradient."""
        grad = self._take(dy)
        return self.linear_gemms.dispatched_grad_output(grad) if isinstance(grad, QuantizedTensor) else grad

    def put_codes(self, codes: QuantizedTensor, placeholder: torch.Tensor) -> None:
        """Store rowwise codes of dy, which the layer receives as this placeholder or a part of its rows."""
        self._pending = codes, placeholder

    def get_codes(self, dy: torch.Tensor) -> QuantizedTensor | None:
        """As ``get``, for a layer that takes the codes of all experts."""
        codes = self._take(dy)
        assert codes is None or isinstance(codes, QuantizedTensor)
        return codes

    def _take(self, dy: torch.Tensor) -> GradOutput | QuantizedTensor | None:
        grad, placeholder = self._pending or (None, dy)
        self._pending = None
        return grad if dy.data_ptr() == placeholder.data_ptr() else None


@dataclass(frozen=True)
class ExpertChannels:
    """Channels of linear_fc2 of the experts on a rank, for dy of all as codes.

    Attributes:
        channels: of each expert; one for all experts that run together.
        tokens: tokens of each channel's part.
    """

    channels: tuple[GradOutputChannel, ...]
    tokens: tuple[int, ...]

    def put(self, codes: QuantizedTensor) -> torch.Tensor:
        """Store rowwise codes [T, O] of dy and return its placeholder for autograd."""
        placeholder = codes.rowwise()[0].new_full((), math.nan, dtype=codes.dtype).expand(codes.shape)
        for channel, part in zip(self.channels, split_rows(codes, self.tokens), strict=True):
            channel.put_codes(part, placeholder)
        return placeholder
