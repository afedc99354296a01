"""Schema of a linear layer's numerics: frozen data with both operands of each of its three GEMMs.

Shapes, with T tokens, I input features, O output features::

    fprop  y_TO  = x_TI  @ w_OI.T     contracts I    operands input, weight
    dgrad  dx_TI = dy_TO @ w_OI       contracts O    operands grad_output, weight
    wgrad  dw_OI = dy_TO.T @ x_TI     contracts T    operands grad_output, input

Scales always run along the contracted dimension; a recipe cannot change that. An operand that is ``None`` stays in the
model's compute dtype (bf16, or fp32 in an fp32 run). dgrad and wgrad quantize from the original tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.recipe.field_types import check_fields
from megatron_lowprec.scaling import SCALE_RULES, ScaleFormat, granularity_of, scale_rules

Rounding = Literal["nearest_even", "half_away", "stochastic"]
Scaling = Literal["current", "delayed"]
HistoryRule = Literal["max", "most_recent"]
HistoryUpdate = Literal["step", "microbatch"]
Signs = Literal["random", "none"]

HADAMARD_BLOCKS = (32, 64, 128, 256)
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
class QuantSpec:
    """Quantization of one operand of one GEMM.

    Attributes:
        format: element format, a key of ``formats.FORMATS``.
        granularity: the entries that share a scale: ``"tensor"``, ``"row"`` (all of the contracted dimension for one
            index of the other), or ``"RxC"``: R indices of the other dimension by C of the contracted one (MX ``1x32``,
            DeepSeek ``1x128`` and ``128x128``).
        scale_format: ``"fp32"`` or ``"e8m0"`` (OCP's power-of-two byte).
        scale_rule: a row of ``scaling.SCALE_RULES``. With A the block's largest magnitude, M the format's maximum, and
            emax its exponent, the decode scale is

            ========= ========= ===============================================================================
            fp32      amax      1 / fl(M / A)
            fp32      amax_pow2 the same, M / A rounded down to a power of two
            e8m0      floor     2^(floor(log2 A) - emax); OCP MX v1.0, section 6.3: values above M saturate
            e8m0      round_up  2^ceil(log2(A / M)); arXiv 2506.08027: nothing saturates
            e8m0      ceil      2^(ceil(log2 A) - emax) (torchao)
            e8m0      even      floor, after A was rounded to the element's mantissa (torchao)
            ========= ========= ===============================================================================
        rounding: ``"nearest_even"``, ``"half_away"`` (microxcaling's default) or ``"stochastic"``.
        random_bits: bits of each draw of stochastic rounding, 1 to 16.
        headroom: factor on the scaled value before rounding. Algorithm 2 of arXiv 2502.20586 uses 3/4, so that nothing
            saturates under the floor rule; the GEMM's accumulator is multiplied by the reciprocal of both operands'
            product.
        amax_floor: smallest A (torchao 1e-12, DeepGEMM 1e-4); 0 for none.
        scaling: ``"current"`` takes A from the tensor itself, ``"delayed"`` from the ``history`` of earlier steps
            (TE).
        history: length of delayed scaling's window.
        history_rule: ``"max"`` over the window, or its ``"most_recent"`` entry.
        history_update: one entry per ``"step"``, the largest amax of its microbatches; or one per ``"microbatch"``, as
            in TE: the window then spans ``history`` / microbatches steps, and the scale changes within a step.
        margin: delayed scaling uses M / 2^margin for M.
    """

    format: str
    granularity: str
    scale_format: ScaleFormat = "fp32"
    scale_rule: str = "amax"
    rounding: Rounding = "nearest_even"
    random_bits: int = 16
    headroom: float = 1.0
    amax_floor: float = 0.0
    scaling: Scaling = "current"
    history: int = 1024
    history_rule: HistoryRule = "max"
    history_update: HistoryUpdate = "step"
    margin: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.format not in FORMATS:
            raise UserError(f"format is {self.format!r}, but must be one of {', '.join(FORMATS)}")
        try:
            granularity_of(self.granularity)
        except ValueError:
            raise UserError(
                f"granularity is {self.granularity!r}, but must be tensor, row or ROWSxCOLUMNS such as 1x32"
            ) from None
        if self.scale_rule not in scale_rules(self.scale_format):
            raise UserError(
                f"scale_rule {self.scale_rule!r} does not belong to scale_format {self.scale_format!r}, "
                f"which has {', '.join(scale_rules(self.scale_format))}"
            )
        if not 1 <= self.random_bits <= 16:
            raise UserError(f"random_bits is {self.random_bits}, but a draw has 1 to 16 bits")
        if not 0.0 < self.headroom <= 1.0:
            raise UserError(f"headroom is {self.headroom}, but must lie above 0 and not above 1")
        if not 0.0 <= self.amax_floor < float("inf"):
            raise UserError(f"amax_floor is {self.amax_floor}, but must be 0 or a positive number")
        if self.scale_format == "e8m0" and self.block is None:
            raise UserError(
                f"granularity {self.granularity} was asked with e8m0 scales, which need blocks such as 1x32; "
                "power-of-two scales of whole rows or tensors are scale_format fp32 with scale_rule amax_pow2"
            )
        if self.scale_format == "e8m0" and self.amax_floor:
            raise UserError(f"amax_floor {self.amax_floor} has no effect on e8m0 scales; leave it at 0")
        if self.margin < 0 or (self.margin and self.scaling != "delayed"):
            raise UserError(f"margin {self.margin} was asked; it is a number from 0 up, for scaling delayed only")
        if self.scaling == "delayed" and (self.granularity, self.scale_format) != ("tensor", "fp32"):
            raise UserError(
                f"scaling delayed was asked with granularity {self.granularity} and {self.scale_format} "
                "scales; a history is kept for granularity tensor with fp32 scales only: use scaling current"
            )
        if self.history < 1:
            raise UserError(f"history is {self.history}, but must be at least 1")

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) of a block, columns along the contracted dimension; None for ``tensor`` and ``row``."""
        return granularity_of(self.granularity).block

    @cached_property
    def power_of_two_scale(self) -> bool:
        """Whether every decode scale is a power of two, so that a dequantized operand is exact in bf16."""
        return SCALE_RULES[self.scale_rule].power_of_two


@dataclass(frozen=True)
class HadamardSpec:
    """Random Hadamard transform of both operands of a GEMM along the contracted dimension, before scaling.

    ``x -> (x * sign) H / sqrt(block)`` on contiguous groups of ``block``, with H Sylvester's matrix and one sign
    vector of ``block`` entries, drawn for each GEMM of each microbatch and shared by its operands (arXiv 2502.20586,
    Algorithm 3), or all ones with ``signs="none"``.
    """

    block: int = 64
    signs: Signs = "random"

    def __post_init__(self) -> None:
        if self.block not in HADAMARD_BLOCKS:
            raise UserError(f"block is {self.block!r}, but must be one of {', '.join(map(str, HADAMARD_BLOCKS))}")
        check_fields(self)


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
        """Whether an operand is rounded stochastically or the transform has random signs."""
        operands = (self.input, self.weight, self.grad_output)
        signs = self.hadamard is not None and self.hadamard.signs == "random"
        return signs or any(quant is not None and quant.rounding == "stochastic" for quant in operands)


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
        for gemm, spec in self.specs():
            _check_gemm(gemm, spec)
        self.delayed_operands()  # raises if one tensor would need two histories

    @property
    def gemms(self) -> dict[str, GemmSpec]:
        """The three GEMMs by name."""
        return {gemm: getattr(self, gemm) for gemm in GEMM_OPERANDS}

    def specs(self) -> Iterator[tuple[str, GemmSpec]]:
        """(GEMM, spec) of all that may run; of a recipe also those of its rules and phases."""
        yield from self.gemms.items()

    @property
    def quantized(self) -> bool:
        """Whether any GEMM is quantized or transformed."""
        return any(spec.quantized for _, spec in self.specs())

    @property
    def random(self) -> bool:
        """Whether any GEMM rounds stochastically or has a Hadamard transform with random signs."""
        return any(spec.random for _, spec in self.specs())

    def delayed_operands(self) -> dict[str, HistorySpec]:
        """operand -> history key of tensors under delayed scaling; each tensor has one history in all layers."""
        found: dict[str, HistorySpec] = {}
        for gemm, spec in self.specs():
            for operand in GEMM_OPERANDS[gemm]:
                quant: QuantSpec | None = getattr(spec, operand)
                if quant is None or quant.scaling != "delayed":
                    continue
                asked = HistorySpec(quant.history, quant.history_rule, quant.history_update)
                if found.setdefault(operand, asked) != asked:
                    raise UserError(
                        f"{operand} is asked to keep two amax histories, {tuple(found[operand])} and, in {gemm}, "
                        f"{tuple(asked)}; give both GEMMs the same history, history_rule and history_update"
                    )
        return found


def _check_gemm(gemm: str, spec: GemmSpec) -> None:
    check_operands(gemm, vars(spec))
    for operand in GEMM_OPERANDS[gemm]:
        quant: QuantSpec | None = getattr(spec, operand)
        if quant is not None and quant.scaling == "delayed" and spec.hadamard is not None:
            raise UserError(
                f"{gemm}.{operand} asks delayed scaling under a Hadamard transform, but no history "
                f"holds its amax: set {gemm}.{operand}.scaling=current or {gemm}.hadamard=null"
            )
