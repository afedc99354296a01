"""Schema of a recipe's training state: Adam's state between steps, and data-parallel gradients."""

from dataclasses import dataclass
from typing import Literal

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.field_types import check_fields

StateFormat = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2"]
StateRounding = Literal["stochastic", "nearest_even"]
GradientFormat = Literal["none", "e4m3", "e5m2"]
GradientSum = Literal["format", "fp32"]
GradientAccumulation = Literal["buffer", "fp32", "format"]
GradientFactorRule = Literal["fixed", "automatic"]


@dataclass(frozen=True)
class OptimizerSpec:
    """Formats of Adam's state between steps (FP8-LM, arXiv 2310.18313, "FP8 optimizer").

    They apply to weights of two or more dimensions. One-dimensional ones (norm gains, biases) keep an fp32 state.

    ``"fp16"``, ``"e4m3"`` and ``"e5m2"`` have one scale per tensor, 2^floor(log2(M / A)) with the format's maximum M
    and the largest magnitude A of all of the tensor's shards on all ranks. ``"bf16"`` has no scale; DeepSeek-V3 (arXiv
    2412.19437, section 3.3.3) has both moments in it, with an fp32 master. An update is computed in fp32 from decoded
    values.

    Attributes:
        exp_avg: first moment.
        exp_avg_sq: second moment.
        master: main weight, from which the model's weight is rounded.
        rounding: of new codes. ``"nearest_even"`` loses updates smaller than half a step of the format.
    """

    exp_avg: StateFormat = "fp32"
    exp_avg_sq: StateFormat = "fp32"
    master: StateFormat = "fp32"
    rounding: StateRounding = "stochastic"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def formats(self) -> dict[str, str]:
        """Part of the state -> its format."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "master": self.master}

    @property
    def quantized(self) -> bool:
        """Whether any state is stored in another format than fp32."""
        return set(self.formats.values()) != {"fp32"}


@dataclass(frozen=True)
class GradientSpec:
    """Storage and reduction of gradients (FP8-LM, arXiv 2310.18313, "FP8 gradient and all-reduce").

    Each rank casts each tensor with one power-of-two scale, from the largest magnitude on any rank, and sends the codes
    of each shard to the rank that updates it.

    Attributes:
        format: format on the wire; ``"none"`` uses Megatron-core's reduction in the gradients' own dtype.
        sum: ``"fp32"`` adds codes in fp32. ``"format"`` rounds each partial sum to the format, in the order of the
            ranks, saturating, as a reduction in the network does: from 8 ranks on it loses small addends. Both send
            the same number of bytes.
        mu: factor of gradients before the cast. ``"fixed"`` is 1. ``"automatic"`` falls to 1/2 if more than 0.001% of
            the codes saturate, and rises to 2 otherwise.
        accumulation: where the gradients of a step's microbatches are added. ``"buffer"``: in Megatron-core's gradient
            buffer, fp32 or bf16 for all weights, until the update. The others store FP8 codes with a scale a tensor,
            one byte a weight, from the end of the backward pass to the update. ``"fp32"``: in fp32 until the step's
            last microbatch. ``"format"``: a tensor is fp32 within one microbatch and is cast again after each.
    """

    format: GradientFormat = "none"
    sum: GradientSum = "fp32"
    mu: GradientFactorRule = "fixed"
    accumulation: GradientAccumulation = "buffer"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stored and not self.quantized:
            raise UserError(
                f"accumulation {self.accumulation} was asked with format none; it stores gradients in the "
                "format: set gradients.format=e4m3, or gradients.accumulation=buffer"
            )

    @property
    def quantized(self) -> bool:
        """Whether gradients are sent in another format than their own."""
        return self.format != "none"

    @property
    def stored(self) -> bool:
        """Whether gradients are stored in the format, instead of Megatron-core's gradient buffer."""
        return self.accumulation != "buffer"
