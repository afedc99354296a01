"""Schema of a linear layer's numerics: frozen data with both operands of each of its three GEMMs.

Shapes, with T tokens, I input features, O output features::

    fprop  y_TO  = x_TI  @ w_OI.T     contracts I    operands input, weight
    dgrad  dx_TI = dy_TO @ w_OI       contracts O    operands grad_output, weight
    wgrad  dw_OI = dy_TO.T @ x_TI     contracts T    operands grad_output, input

Scales always run along the contracted dimension; a recipe cannot change that. An operand that is ``None`` stays in the
model's compute dtype (bf16, or fp32 in an fp32 run). ``quant_spec`` has the schema of one operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.field_types import check_fields, named_place
from megatron_lowprec.recipe.quant_spec import HistoryRule, HistoryUpdate, QuantSpec

TransformOutput = Literal["fp32", "operand"]

HADAMARD_BLOCKS = (16, 32, 64, 128, 256)
FIXED_SIGNS = {"nvfp4": (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)}
"""Sign vectors that all layers share: ``nvfp4`` is TransformerEngine's."""

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
class HadamardSpec:
    """Hadamard transform of both operands of a GEMM along the contracted dimension, before scaling.

    ``x -> (x * sign) H / sqrt(block)`` on contiguous groups of ``block``, with H Sylvester's matrix and one sign
    vector of ``block`` entries, shared by the GEMM's operands.

    Attributes:
        signs: ``"random"``, drawn for each GEMM of each microbatch (arXiv 2502.20586, Algorithm 3); ``"none"``, all
            ones; or a row of ``FIXED_SIGNS``, whose length is the block.
        output: ``"fp32"``, the transformed entries are quantized as computed; ``"operand"``, they are rounded to the
            tensor's dtype before (TransformerEngine).
    """

    block: int = 64
    signs: str = "random"
    output: TransformOutput = "fp32"

    def __post_init__(self) -> None:
        if self.block not in HADAMARD_BLOCKS:
            raise UserError(f"block is {self.block!r}, but must be one of {', '.join(map(str, HADAMARD_BLOCKS))}")
        check_fields(self)
        choices = ("random", "none", *FIXED_SIGNS)
        if self.signs not in choices:
            raise UserError(f"signs is {self.signs!r}, but must be one of {', '.join(choices)}")
        if self.fixed_signs is not None and (length := len(self.fixed_signs)) != self.block:
            raise UserError(
                f"signs {self.signs} has {length} entries, and block is {self.block}: set hadamard.block={length}"
            )

    @property
    def fixed_signs(self) -> tuple[int, ...] | None:
        """The fixed sign vector; None for random signs."""
        return (1,) * self.block if self.signs == "none" else FIXED_SIGNS.get(self.signs)


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
class LinearRecipe:
    """Numerics of one linear layer: its three GEMMs, with the name, summary and source of the recipe they are from."""

    name: str
    summary: str
    source: str = ""
    fprop: GemmSpec = field(default_factory=GemmSpec)
    dgrad: GemmSpec = field(default_factory=GemmSpec)
    wgrad: GemmSpec = field(default_factory=GemmSpec)

    def __post_init__(self) -> None:
        check_fields(self)
        for place, gemm, spec in self.placed_specs():
            with named_place(place):
                _check_gemm(gemm, spec)
        check_sources(self.gemms)
        self.delayed_operands()  # raises if one tensor would need two histories

    @property
    def gemms(self) -> dict[str, GemmSpec]:
        """The three GEMMs by name."""
        return {gemm: getattr(self, gemm) for gemm in GEMM_OPERANDS}

    def placed_specs(self) -> Iterator[tuple[str, str, GemmSpec]]:
        """(place, GEMM, spec) of all that may run; of a recipe also those of its rules and phases, such as rules[0]."""
        yield from (("", gemm, spec) for gemm, spec in self.gemms.items())

    def specs(self) -> Iterator[tuple[str, GemmSpec]]:
        """``placed_specs`` without places."""
        yield from ((gemm, spec) for _, gemm, spec in self.placed_specs())

    @property
    def quantized(self) -> bool:
        """Whether any GEMM is quantized or transformed."""
        return any(spec.quantized for _, spec in self.specs())

    @cached_property
    def random(self) -> bool:
        """Whether any GEMM rounds stochastically or has a Hadamard transform with random signs."""
        return any(spec.random for _, spec in self.specs())

    @property
    def moves_within_steps(self) -> bool:
        """Whether delayed scales change between the microbatches of a step."""
        return any(spec.update == "microbatch" for spec in self.delayed_operands().values())

    def delayed_operands(self) -> dict[str, HistorySpec]:
        """operand -> history key of tensors under delayed scaling; each tensor has one history in all layers."""
        found: dict[str, HistorySpec] = {}
        for place, gemm, spec in self.placed_specs():
            for operand in GEMM_OPERANDS[gemm]:
                quant: QuantSpec | None = getattr(spec, operand)
                if quant is None or quant.scaling != "delayed":
                    continue
                asked = HistorySpec(quant.history, quant.history_rule, quant.history_update)
                if found.setdefault(operand, asked) != asked:
                    raise UserError(
                        f"{operand} is asked to keep two amax histories, {tuple(found[operand])} and, in "
                        f"{f'{place}.{gemm}'.lstrip('.')}, "
                        f"{tuple(asked)}; give both GEMMs the same history, history_rule and history_update"
                    )
        return found


def check_sources(gemms: Mapping[str, GemmSpec], place: str = "") -> None:
    """Reject source fprop where fprop quantizes no such operand, transforms it, or forgets its scale within a step.

    Args:
        gemms: the three GEMMs of a layer.
        place: rule or phase that they are from; empty for the recipe's own.
    """
    fprop = gemms["fprop"]
    for gemm, operands in GEMM_OPERANDS.items():
        for operand in operands:
            quant: QuantSpec | None = getattr(gemms[gemm], operand)
            if quant is None or quant.source == "original":
                continue
            start, advice = (f"{place}: ", f"give {place} its own {gemm}, or ") if place else ("", "")
            first: QuantSpec | None = getattr(fprop, operand)
            if gemm == "fprop" or first is None or fprop.hadamard is not None:
                raise UserError(
                    f"{start}{gemm}.{operand}.source is fprop, which dgrad.weight and wgrad.input can have if fprop "
                    f"quantizes the same tensor without a Hadamard transform: {advice}set {gemm}.{operand}.source="
                    "original"
                )
            if first.scaling == "delayed" and first.history_update == "microbatch":
                raise UserError(
                    f"{start}{gemm}.{operand}.source is fprop, whose scale may change before the backward pass, as "
                    f"fprop.{operand}.history_update is microbatch: set it to step, or {gemm}.{operand}.source=original"
                )


def _check_gemm(gemm: str, spec: GemmSpec) -> None:
    check_operands(gemm, vars(spec))
    operands = GEMM_OPERANDS[gemm]
    if spec.hadamard is not None and not any(getattr(spec, operand) for operand in operands):
        raise UserError(
            f"{gemm} has a Hadamard transform and no quantized operand: set {gemm}.hadamard=null, or quantize "
            f"{' or '.join(operands)}"
        )
    first, second = (quant and quant.sum_width for quant in (getattr(spec, operand) for operand in operands))
    if first and second and first != second:
        raise UserError(
            f"{gemm} has a scale for {first} columns of {operands[0]} and one for {second} of {operands[1]}, but each "
            "partial sum has one of both: give them blocks of equal columns, or one of them granularity row or "
            "scale_rule amax_pow2"
        )
    for operand in operands:
        quant: QuantSpec | None = getattr(spec, operand)
        if quant is not None and quant.scaling == "delayed" and spec.hadamard is not None:
            raise UserError(
                f"{gemm}.{operand} asks delayed scaling under a Hadamard transform, but no history "
                f"holds its amax: set {gemm}.{operand}.scaling=current or {gemm}.hadamard=null"
            )
        if quant is not None and quant.source == "fprop" and spec.hadamard and spec.hadamard.output == "operand":
            raise UserError(
                f"{gemm}.hadamard.output is operand and {gemm}.{operand}.source is fprop, whose dequantized tensor has "
                f"no dtype to round to: set {gemm}.hadamard.output=fp32"
            )
        if quant is None or quant.correction is None:
            continue
        if spec.hadamard is None or quant.block is None or spec.hadamard.block % quant.block[1]:
            group = "no Hadamard transform" if spec.hadamard is None else f"a transform of {spec.hadamard.block}"
            raise UserError(
                f"{gemm}.{operand}.correction is {quant.correction} with blocks of {quant.granularity} and {group}, "
                f"whose groups share a factor: set {gemm}.hadamard.block to a multiple of the block, or correction=null"
            )
