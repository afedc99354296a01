"""AdamW with state in narrow formats and a power-of-two scale a tensor, in two passes over the state.

The scale of a tensor's new codes depends on the amax of all its new values, over the ranks that hold a part. The first
pass computes the amax and stores nothing else; the second recomputes the values and writes their codes.

Codes are rounded stochastically if a slot has a ``Stream``. Entry e of the unsharded tensor, in row-major order, takes
16 bits from the Philox call with counter

    (e // 8, 0, step, part)

where ``part`` is the index in ``STATE`` and ``step`` counts updates from 1: word ``(e % 8) // 2``, low half for even
entries, high half for odd ones. The draws of a tensor therefore do not depend on its sharding.

A positive second moment is raised at least to its format's smallest number. After underflow to zero, eps alone would
divide a nonzero first moment. bf16 state has fp32's range, and so neither a scale nor this bound.

State without scales needs only the second pass. It is then AdamW with clipping before it and the rounding of the
model's weights behind it, in one pass over memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lowprec.formats import FORMATS, Format
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.philox.reference import VALUES_PER_CALL, WHOLE, ShardSlice, halves, philox
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale, round_to_format, uniform_from_bits

STATE = ("exp_avg", "exp_avg_sq", "master")
SECOND = STATE.index("exp_avg_sq")
FORMAT_OF = {
    **{dtype: FORMATS[name] for name, dtype in DTYPES.items()},
    torch.float16: Format("fp16", 5, 10, bias=15, max=65504.0, specials="ieee", source="IEEE 754, binary16"),
}


@dataclass(frozen=True)
class Hyperparameters:
    """AdamW's hyperparameters for one step, with torch's names; ``step`` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def step_size(self) -> float:
        """Learning rate divided by the bias correction of the first moment."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """Factor of the second moment's root: 1 / sqrt(bias correction)."""
        return float((1 - self.beta2**self.step) ** -0.5)


class Stream(NamedTuple):
    """Random draws of a slot, with the location of its entries in the unsharded tensor.

    Attributes:
        key: Philox key, two 32-bit words.
        columns: row length of this rank's shard; a multiple of 8, unless the shard is a single row.
        first: row-major index of the slot's first entry in this rank's shard.
        whole_columns: row length of the unsharded tensor.
        first_column: first column of this rank's shard.
        rows: location of the shard's rows.
    """

    key: tuple[int, int]
    columns: int
    first: int = 0
    whole_columns: int = 0
    first_column: int = 0
    rows: ShardSlice = WHOLE

    def draw(self, count: int, step: int, part: int, device: torch.device) -> torch.Tensor:
        """16 random bits for each of the slot's ``count`` entries: int64 [count]."""
        start = self.first - self.first % VALUES_PER_CALL
        entry = torch.arange(start, self.first + count, VALUES_PER_CALL, device=device)
        row, column = entry // self.columns, entry % self.columns
        call = (self.rows.place(row) * self.whole_columns + self.first_column + column) // VALUES_PER_CALL
        zero, steps, parts = (torch.full_like(call, value) for value in (0, step, part))
        return halves(philox((call, zero, steps, parts), self.key)).view(-1)[self.first - start :][:count]


class Slot(NamedTuple):
    """Gradient, model weight and optimizer state of one tensor, all of one size.

    Attributes:
        grad: fp32 or bf16.
        weight: the model's weight, any dtype; receives the rounded new main weight. None if there is none to write.
        exp_avg, exp_avg_sq, master: fp32, bf16, fp16 or FP8 codes.
        decode_scale: fp32 [3], multiplies these three when decoded; overwritten with the codes. Not read for state
            without scales.
        stream: draws of stochastic rounding; None rounds to nearest even.
    """

    grad: torch.Tensor
    weight: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor
    decode_scale: torch.Tensor
    stream: Stream | None = None

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The state in the order of ``STATE``."""
        return self.exp_avg, self.exp_avg_sq, self.master


def encode_scale(amax: torch.Tensor, dtype: torch.dtype, margin: int = 0) -> torch.Tensor:
    """2^floor(log2(fl((M / 2^margin) / amax))) with M the maximum of ``dtype``: fp32, the shape of ``amax``.

    1 for fp32 and bf16 state, and where ``amax`` is 0 or not finite; a quotient beyond fp32 is clamped to its maximum.

    Args:
        amax: fp32, any shape, not negative.
    """
    if dtype not in FORMAT_OF:
        return torch.ones_like(amax)
    return fp32_encode_scale(amax, FORMAT_OF[dtype], "amax_pow2", margin=margin).nan_to_num(nan=1.0)


def update_amax(slots: Sequence[Slot], step: Hyperparameters, grad_factor: torch.Tensor | None = None) -> torch.Tensor:
    """Amax of the new exp_avg, exp_avg_sq and main weight of each slot: fp32 [len(slots), 3].

    Args:
        grad_factor: as for ``update_``; NaN: the amaxes mean nothing.
    """
    rows = [torch.stack([new.abs().amax() for new in _updated(slot, step, grad_factor)]) for slot in slots]
    return torch.stack(rows)


def update_(
    slots: Sequence[Slot],
    step: Hyperparameters,
    encode_scales: torch.Tensor | None,
    grad_factor: torch.Tensor | None = None,
) -> None:
    """Write the new state's codes, their decode scales, and the model's weights.

    A weight is the decoded main weight, rounded to the weight's dtype.

    Args:
        encode_scales: fp32 [len(slots), 3], powers of two that multiply the new values before rounding. None if the
            state is fp32 or bf16 and has no scales.
        grad_factor: fp32 scalar, multiplies the gradients; NaN: nothing is written.
    """
    if grad_factor is not None and bool(grad_factor.isnan()):
        return
    for i, slot in enumerate(slots):
        scales = torch.ones(3) if encode_scales is None else encode_scales[i]
        if encode_scales is None:
            slot = slot._replace(decode_scale=torch.ones(3))
        for part, (codes, new) in enumerate(zip(slot.state, _updated(slot, step, grad_factor), strict=True)):
            scaled = new * scales[part]
            if part == SECOND:
                scaled = not_to_zero(scaled, codes.dtype)
            codes.copy_(_rounded(scaled, codes.dtype, slot.stream, step.step, part))
        slot.decode_scale.copy_(1 / scales)
        if slot.weight is not None:
            slot.weight.copy_(slot.master.float() * slot.decode_scale[2])


def not_to_zero(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A scaled second moment with positive values raised to ``dtype``'s smallest: eps would divide where one is 0."""
    if dtype not in FORMAT_OF:
        return scaled
    return torch.where(scaled > 0, scaled.clamp(min=FORMAT_OF[dtype].smallest), scaled)


def random_bits(fmt: Format) -> int:
    """Bits of a draw that rounds fp32 to ``fmt``: at most those that fp32 has below the format's mantissa."""
    return min(16, 23 - fmt.mantissa_bits)


def _rounded(scaled: torch.Tensor, dtype: torch.dtype, stream: Stream | None, step: int, part: int) -> torch.Tensor:
    """fp32 on the grid of ``dtype`` if ``stream`` is given, else ``scaled``, which the caller's cast rounds."""
    if stream is None and dtype in DTYPES.values():  # torch's cast to E5M2 does not saturate
        return scaled.clamp(-FORMAT_OF[dtype].max, FORMAT_OF[dtype].max)
    if stream is None or dtype == torch.float32:
        return scaled
    bits = stream.draw(scaled.numel(), step, part, scaled.device).view(scaled.shape)
    if dtype == torch.bfloat16:
        return _stochastic_bf16(scaled, bits)
    fmt = FORMAT_OF[dtype]
    return round_to_format(scaled, fmt, "stochastic", uniform_from_bits(bits, random_bits(fmt)))


def _stochastic_bf16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 ``values`` rounded up in magnitude if their low 16 bits plus 16 random ``bits`` carry; NaN stays NaN."""
    largest = torch.finfo(torch.bfloat16).max
    raised = values.clamp(-largest, largest).view(torch.int32) + bits.to(torch.int32)
    return torch.where(values.isnan(), values, (raised & -65536).view(torch.float32))


def _updated(
    slot: Slot, step: Hyperparameters, grad_factor: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New state in fp32, in torch's order of AdamW's operations; scalars are rounded to fp32 first."""
    grad = slot.grad.float() if grad_factor is None else slot.grad.float() * grad_factor
    exp_avg, exp_avg_sq, master = (
        codes.float() * scale for codes, scale in zip(slot.state, slot.decode_scale, strict=True)
    )
    master *= 1 - step.lr * step.weight_decay
    exp_avg += (grad - exp_avg) * (1 - step.beta1)
    exp_avg_sq = exp_avg_sq * step.beta2 + grad * grad * (1 - step.beta2)
    root = exp_avg_sq.double().sqrt().float()  # on a CPU, torch's fp32 sqrt can be off by one ulp
    master -= step.step_size * (exp_avg / (root * step.root_correction + step.eps))
    return exp_avg, exp_avg_sq, master
