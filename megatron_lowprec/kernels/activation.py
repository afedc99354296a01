"""Activations between the linear layers of an MLP, each as one op or as the prologue of a cast.

Both ways have the same bits, so a layer chooses by what its casts support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_lowprec.kernels import dispatch
from megatron_lowprec.kernels.cast_fp8.prologue import BiasGelu, BiasGeluGrad, CastPrologue, Swiglu, SwigluGrad

_Bias = torch.Tensor | None


class Activation(NamedTuple):
    """An activation of y [T, O], the output of linear_fc1 without its bias [O].

    Attributes:
        forward: (y, bias, amax) -> the activation's output; raises ``amax``, fp32 [1], to its amax if given.
        backward: (dout, y, bias, amax) -> gradients of y and of the bias; raises ``amax`` to that of y's.
        source: (y, bias) -> the output as a cast's prologue.
        grad_source: (dout, y, bias) -> y's gradient as a cast's prologue.
    """

    forward: Callable[[torch.Tensor, _Bias, _Bias], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor, _Bias, _Bias], tuple[torch.Tensor, _Bias]]
    source: Callable[[torch.Tensor, _Bias], CastPrologue]
    grad_source: Callable[[torch.Tensor, torch.Tensor, _Bias], CastPrologue]


def _of(bias: _Bias) -> torch.Tensor:
    assert bias is not None, "GELU is fused with a bias"
    return bias


BIAS_GELU = Activation(
    lambda y, bias, amax: dispatch.bias_gelu(y, _of(bias), amax),
    lambda dout, y, bias, amax: dispatch.bias_gelu_backward(dout, y, _of(bias), amax),
    lambda y, bias: BiasGelu(y, _of(bias)),
    lambda dout, y, bias: BiasGeluGrad(dout, y, _of(bias)),
)
"""GELU of y + bias."""

SWIGLU = Activation(
    lambda y, bias, amax: dispatch.swiglu(y, amax),
    lambda dout, y, bias, amax: (dispatch.swiglu_backward(dout, y, amax), None),
    lambda y, bias: Swiglu(y),
    lambda dout, y, bias: SwigluGrad(dout, y),
)
"""SwiGLU of y without a bias."""
