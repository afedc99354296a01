"""AdamW on a state in narrow formats, a power-of-two scale a tensor: an update reads the state twice.

The scale of a tensor's next codes follows the largest magnitude of all of its new values, on every rank that holds a
part of them: a first pass finds it and keeps nothing, a second computes the same values again and writes their codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lowprec.formats import FORMATS, Format
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale

STATE = ("exp_avg", "exp_avg_sq", "master")
_FORMATS = {
    torch.float8_e4m3fn: FORMATS["e4m3"],
    torch.float8_e5m2: FORMATS["e5m2"],
    torch.float16: Format("fp16", 5, 10, bias=15, max=65504.0, specials="ieee", source="IEEE 754, binary16"),
}


@dataclass(frozen=True)
class Hyperparameters:
    """Of AdamW, for one step; ``step`` counts from 1. The names are torch's."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def step_size(self) -> float:
        """The learning rate over the bias correction of the first moment."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """What the root of the second moment is multiplied by: one over the root of its bias correction."""
        return float((1 - self.beta2**self.step) ** -0.5)


class Slot(NamedTuple):
    """One tensor: its gradient, the weight of the model, and what is kept between steps, all of one size.

    Attributes:
        grad: fp32 or bf16.
        weight: what the new main weight is rounded into, any dtype.
        exp_avg, exp_avg_sq, master: fp32, fp16 or FP8 codes.
        decode_scale: fp32 [3], what these three are multiplied by; overwritten with the codes.
    """

    grad: torch.Tensor
    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor
    decode_scale: torch.Tensor

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order of ``STATE``."""
        return self.exp_avg, self.exp_avg_sq, self.master


def encode_scale(amax: torch.Tensor, dtype: torch.dtype, margin: int = 0) -> torch.Tensor:
    """2^(floor(log2(fl(M / amax))) - margin) with M the maximum of ``dtype``: fp32, the shape of ``amax``.

    1 for fp32, and where ``amax`` is 0 or not finite; a quotient beyond fp32 counts as its maximum.

    Args:
        amax: fp32, any shape, not negative.
    """
    if dtype == torch.float32:
        return torch.ones_like(amax)
    return fp32_encode_scale(amax, _FORMATS[dtype], "amax_pow2", margin=margin).nan_to_num(nan=1.0)


def update_amax(slots: Sequence[Slot], step: Hyperparameters) -> torch.Tensor:
    """Largest magnitudes of the new exp_avg, exp_avg_sq and main weight of each slot: fp32 [len(slots), 3]."""
    rows = [torch.stack([new.abs().amax() for new in _updated(slot, step)]) for slot in slots]
    return torch.stack(rows)


def update_(slots: Sequence[Slot], step: Hyperparameters, encode_scales: torch.Tensor) -> None:
    """Take one step: codes of the new state, their decode scales, and the model's weights.

    A weight is what its main weight's codes decode to, rounded to its dtype.

    Args:
        encode_scales: fp32 [len(slots), 3], powers of two that the new values are multiplied by before rounding.
    """
    for slot, scales in zip(slots, encode_scales, strict=True):
        for codes, new, scale in zip(slot.state, _updated(slot, step), scales, strict=True):
            codes.copy_(new * scale)
        slot.decode_scale.copy_(1 / scales)
        slot.weight.copy_(slot.master.float() * slot.decode_scale[2])


def _updated(slot: Slot, step: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new values in fp32, by torch's order of AdamW's operations; numbers are rounded to fp32 first."""
    grad = slot.grad.float()
    exp_avg, exp_avg_sq, master = (
        codes.float() * scale for codes, scale in zip(slot.state, slot.decode_scale, strict=True)
    )
    master *= 1 - step.lr * step.weight_decay
    exp_avg += (grad - exp_avg) * (1 - step.beta1)
    exp_avg_sq = exp_avg_sq * step.beta2 + grad * grad * (1 - step.beta2)
    root = exp_avg_sq.double().sqrt().float()  # torch's root in fp32 is an ulp off at times, on a CPU
    master -= step.step_size * (exp_avg / (root * step.root_correction + step.eps))
    return exp_avg, exp_avg_sq, master
