"""Schema of recipes: frozen data with both operands' numerics for each of a linear layer's three GEMMs, and the formats
of saved activations, optimizer state and data-parallel gradients.

Shapes, with T tokens, I input features, O output features::

    fprop  y_TO  = x_TI  @ w_OI.T     contracts I    operands input, weight
    dgrad  dx_TI = dy_TO @ w_OI       contracts O    operands grad_output, weight
    wgrad  dw_OI = dy_TO.T @ x_TI     contracts T    operands grad_output, input

Scales always run along the contracted dimension; a recipe cannot change that. An operand that is ``None`` stays in the
model's compute dtype (bf16, or fp32 in an fp32 run). ``quant_spec`` has the schema of one operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.activation_spec import ActivationSpec
from megatron_lowprec.recipe.field_types import check_fields
from megatron_lowprec.recipe.quant_spec import HadamardSpec, HistoryRule, HistoryUpdate, QuantSpec

StateFormat = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2"]
StateRounding = Literal["stochastic", "nearest_even"]
GradientFormat = Literal["none", "e4m3", "e5m2"]
GradientSum = Literal["format", "fp32"]
GradientAccumulation = Literal["buffer", "fp32", "format"]
GradientFactorRule = Literal["fixed", "automatic"]

GEMM_OPERANDS: dict[str, tuple[str, str]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}


def check_operands(gemm: str, fields: Mapping[str, object]) -> None:
    """Reject a tensor among the fields of a GEMM that is no operand of it."""
    operands = GEMM_OPERANDS[gemm]
    for tensor in ("input", "weight", "grad_output"):
        if tensor not in operands and fields.get(tensor) is not None:
            raise UserError(f"{gemm} multiplies {' and '.join(operands)}; {gemm}.{tensor} must be left out")


class HistorySpec(NamedTuple):
    """Key of an amax history: fields of the ``QuantSpec`` of a tensor under delayed scaling."""

    length: int
    rule: HistoryRule
    update: HistoryUpdate = "step"


@dataclass(frozen=True)
class GemmSpec:
    """One GEMM: its two operands (the third stays None, see ``GEMM_OPERANDS``), their transform, and its accumulation.

    ``fast_accumulation`` allows a native FP8 GEMM to accumulate in the tensor core's own narrower accumulator, as
    TransformerEngine does in fprop; an emulated GEMM accumulates in fp32 and ignores it, but for the driver's
    ``--emulate-accumulator``.
    """

    input: QuantSpec | None = None
    weight: QuantSpec | None = None
    grad_output: QuantSpec | None = None
    hadamard: HadamardSpec | None = None
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def quantized(self) -> bool:
        """Whether the GEMM is anything but a plain one in the compute dtype."""
        return any((self.input, self.weight, self.grad_output, self.hadamard))

    @property
    def random(self) -> bool:
        """Whether an operand or its scale is rounded stochastically, or the transform has random signs."""
        operands = (self.input, self.weight, self.grad_output)
        signs = self.hadamard is not None and self.hadamard.signs == "random"
        return signs or any(quant is not None and quant.random for quant in operands)


@dataclass(frozen=True)
class KeepBf16:
    """Linear layers that stay in the compute dtype, by global layer number (1-based, over all pipeline stages).

    ``names`` are globs over ``layers.<number>.<linear>``, such as ``layers.3.*`` or ``*.linear_proj``.
    """

    first_layers: int = 0
    last_layers: int = 0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("first_layers", "last_layers"):
            if (count := getattr(self, name)) < 0:
                raise UserError(f"{name} is {count}, but must be a number of layers, 0 or more")


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


@dataclass(frozen=True)
class Recipe:
    """Named numerics for every linear layer of a transformer, for the optimizer and for data parallelism.

    Embeddings, output layer, router, norms, softmax and attention's GEMMs are never quantized.

    ``fp8_weights`` stores the weights of quantized linear layers only as the FP8 codes that fprop and dgrad multiply,
    without a copy in the compute dtype; the option ``--fp8-param-gather`` sets the same for one run.
    """

    name: str
    summary: str
    source: str = ""
    fprop: GemmSpec = field(default_factory=GemmSpec)
    dgrad: GemmSpec = field(default_factory=GemmSpec)
    wgrad: GemmSpec = field(default_factory=GemmSpec)
    keep_bf16: KeepBf16 = field(default_factory=KeepBf16)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    gradients: GradientSpec = field(default_factory=GradientSpec)
    activations: ActivationSpec = field(default_factory=ActivationSpec)
    fp8_weights: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for gemm, operands in GEMM_OPERANDS.items():
            spec: GemmSpec = getattr(self, gemm)
            check_operands(gemm, vars(spec))
            for operand in operands:
                quant: QuantSpec | None = getattr(spec, operand)
                if quant is not None and quant.scaling == "delayed" and spec.hadamard is not None:
                    raise UserError(
                        f"{gemm}.{operand} asks delayed scaling under a Hadamard transform, but no history "
                        f"holds its amax: set {gemm}.{operand}.scaling=current or {gemm}.hadamard=null"
                    )
                if quant is not None and quant.source == "fprop":
                    self._check_source(gemm, operand)
        self.delayed_operands()  # raises if one tensor would need two histories

    def _check_source(self, gemm: str, operand: str) -> None:
        """Reject source fprop where fprop quantizes no such operand, or transforms it."""
        if gemm == "fprop" or getattr(self.fprop, operand) is None or self.fprop.hadamard is not None:
            raise UserError(
                f"{gemm}.{operand}.source is fprop, which dgrad.weight and wgrad.input can have if fprop quantizes the "
                f"same tensor without a Hadamard transform: set {gemm}.{operand}.source=original"
            )

    @property
    def gemms(self) -> dict[str, GemmSpec]:
        """The three GEMMs by name."""
        return {gemm: getattr(self, gemm) for gemm in GEMM_OPERANDS}

    @property
    def quantized(self) -> bool:
        """Whether any GEMM is quantized or transformed."""
        return any(gemm.quantized for gemm in self.gemms.values())

    @property
    def random(self) -> bool:
        """Whether any GEMM rounds stochastically or has a Hadamard transform with random signs."""
        return any(gemm.random for gemm in self.gemms.values())

    @property
    def changes_training(self) -> bool:
        """Whether optimizer state, gradients or the storage of weights differ from Megatron-core's."""
        return self.optimizer.quantized or self.gradients.quantized or self.fp8_weights

    def delayed_operands(self) -> dict[str, HistorySpec]:
        """operand -> history key of tensors under delayed scaling; each tensor has one history."""
        found: dict[str, HistorySpec] = {}
        for gemm, operands in GEMM_OPERANDS.items():
            for operand in operands:
                quant: QuantSpec | None = getattr(getattr(self, gemm), operand)
                if quant is None or quant.scaling != "delayed":
                    continue
                asked = HistorySpec(quant.history, quant.history_rule, quant.history_update)
                if found.setdefault(operand, asked) != asked:
                    raise UserError(
                        f"{operand} is asked to keep two amax histories, {tuple(found[operand])} and, in {gemm}, "
                        f"{tuple(asked)}; give both GEMMs the same history, history_rule and history_update"
                    )
        return found
