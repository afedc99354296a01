"""Operands that are made where a tensor is computed, and reach the layer that multiplies them in the tensor's place.

Between both lies autograd, which carries tensors alone. What it carries here holds no memory and is NaN to whoever
reads it: a mistake shows in the loss, it does not bend it a little.
"""

import math

import torch

from megatron_lowprec.linear.linear_gemms import LinearNumerics
from megatron_lowprec.linear.operands import GradOutput, Help, Input
from megatron_lowprec.mcore.carried import carried, carry
from megatron_lowprec.quantization.random_stream import Moment


def stand_in(x: torch.Tensor) -> torch.Tensor:
    """NaN of the shape, dtype and device of x, in one cell of memory."""
    return x.new_full((), math.nan).expand(x.shape)


def note_input(y: torch.Tensor, made: Input, numerics: LinearNumerics) -> None:
    """Say that ``made`` is y for the layer of ``numerics``, which alone reads it."""
    carry(y, "input", (numerics, made))


def made_input(x: torch.Tensor, numerics: LinearNumerics) -> Input | None:
    """x as operands, where they were made for this layer."""
    layer, made = carried(x, "input") or (None, None)
    return made if layer is numerics else None


class Handover:
    """Through which the function behind a linear layer hands the layer its dy as ``GradOutput``, in the backward pass.

    One for each call of a layer. It travels with the layer's output y to the function that alone takes y, as long as
    y is not changed on the way; where it gets lost, or that function makes nothing, dy is the tensor it always was.

    Attributes:
        numerics, moment: of the layer's call.
        wanted: how the casts of dy are helped: "source" or "amax".
    """

    def __init__(self, numerics: LinearNumerics, moment: Moment, wanted: Help) -> None:
        self.numerics, self.moment, self.wanted = numerics, moment, wanted
        self._made: tuple[GradOutput, torch.Tensor] | None = None

    def note_on(self, y: torch.Tensor) -> None:
        """Let y carry it."""
        carry(y, "handover", self)

    @staticmethod
    def on(y: torch.Tensor) -> "Handover | None":
        """What y carries, where y is as its layer has made it."""
        handover: Handover | None = carried(y, "handover")
        return handover

    def give(self, made: GradOutput) -> torch.Tensor:
        """Hand over dy; what to return to autograd as the gradient of y: nobody but the layer may read it."""
        placeholder = stand_in(made.matrix)
        self._made = made, placeholder
        return placeholder

    def take(self, dy: torch.Tensor) -> GradOutput | None:
        """What ``give`` was given, where dy is what it returned, in any shape; None where dy is to be read itself."""
        made, placeholder = self._made or (None, dy)
        self._made = None
        return made if dy.data_ptr() == placeholder.data_ptr() else None
