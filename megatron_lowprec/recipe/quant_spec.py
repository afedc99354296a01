"""Quantization of one operand: its elements and the levels of its scale; frozen data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import ELEMENT_FORMATS, FORMATS
from megatron_lowprec.recipe.field_types import check_fields, named_place
from megatron_lowprec.scaling import CODED_SCALE_FORMATS, SCALE_FORMATS, SCALE_RULES, granularity_of, scale_rules

Rounding = Literal["nearest_even", "half_away", "stochastic"]
ScaleRounding = Literal["nearest_even", "stochastic"]
Scaling = Literal["current", "delayed"]
HistoryRule = Literal["max", "most_recent", "held"]
HistoryUpdate = Literal["step", "microbatch"]
Source = Literal["original", "fprop"]
FourOverSix = Literal["mse", "mae", "abs_max"]
ZeroCode = Literal["zero", "flush", "one"]
Correction = Literal["eden"]

_EXACT_BITS = 8  # of the significand in bf16
_LEAST, _MOST = 2.0**-63, 2.0**63  # factors of both operands are multiplied in fp32
_RANGE = "fp32 takes 2^-63 to 2^63"


@dataclass(frozen=True)
class ScaleSpec:
    """Scales of the blocks of an operand.

    Attributes:
        granularity: the entries that share a scale: ``"tensor"``, ``"row"`` (all of the contracted dimension for one
            index of the other), or ``"RxC"``: R indices of the other dimension by C of the contracted one (MX ``1x32``,
            DeepSeek ``1x128`` and ``128x128``, NVFP4 ``1x16``).
        format: ``"fp32"``, ``"e8m0"`` (OCP's power-of-two byte), or a coded one, ``"e4m3"``, ``"ue4m3"``, ``"ue5m3"``.
        rule: a row of ``scaling.SCALE_RULES``. With A the block's largest magnitude, M the element format's maximum,
            emax its exponent, and G and D the tensor scale's encode and decode scale (1 without one), the decode scale
            is, each operation rounded to fp32,

            ====== ========= ===============================================================================
            fp32   amax      1 / (M / A)
            fp32   amax_pow2 the same, M / A rounded down to a power of two
            e8m0   floor     2^(floor(log2 A) - emax); OCP MX v1.0, section 6.3: values above M saturate
            e8m0   round_up  2^ceil(log2(A / M)); arXiv 2506.08027: nothing saturates
            e8m0   ceil      2^(ceil(log2 A) - emax) (torchao)
            e8m0   even      floor, after A was rounded to the element's mantissa (torchao)
            coded  product   code(A (G (1 / M))) times D = 1 / G (TransformerEngine)
            coded  base      code((A / M) G) times D = 1 / G (four-over-six)
            coded  quotient  code((A / M) / D) times D (torchao)
            coded  divided   the same, D = (amax / (target / M)) / M (Quartet II)
            ====== ========= ===============================================================================
        rounding: of a coded scale; ``"stochastic"`` draws one number a block.
        amax_floor: smallest A of an fp32 scale (torchao 1e-12, DeepGEMM 1e-4); 0 for none.
        block_target: M of a coded scale: the magnitude that a block's amax is mapped to; None for the element format's
            maximum. Under 16/17 of it, 6 / (17 / 16) for E2M1, no entry saturates, however an E4M3 scale is rounded.
        four_over_six: maps each block's amax to M, or by a scale 3/2 as large to 2/3 of M, whichever gives the lower
            error: ``"mse"``, ``"mae"`` or ``"abs_max"``; M at a tie (arXiv 2512.02010). None for M.
        zero_code: what a coded scale that rounds to 0 is: ``"zero"``, under which entries saturate and decode to 0
            (TransformerEngine); ``"flush"``, the same under which entries are 0 (fouroversix); ``"one"``, the scale 1,
            under which small entries can be rounded up stochastically (arXiv 2509.17791, arXiv 2601.22813).
    """

    granularity: str
    format: str = "fp32"
    rule: str = "amax"
    rounding: ScaleRounding = "nearest_even"
    amax_floor: float = 0.0
    block_target: float | None = None
    four_over_six: FourOverSix | None = None
    zero_code: ZeroCode = "zero"

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            block = granularity_of(self.granularity).block
        except ValueError:
            raise UserError(
                f"granularity is {self.granularity!r}, but must be tensor, row or ROWSxCOLUMNS such as 1x32, of up to "
                "2^20 entries"
            ) from None
        if self.format not in SCALE_FORMATS:
            raise UserError(f"format is {self.format!r}, but must be one of {', '.join(SCALE_FORMATS)}")
        if self.rule not in scale_rules(self.format):
            raise UserError(
                f"rule {self.rule!r} does not belong to format {self.format!r}, "
                f"which has {', '.join(scale_rules(self.format))}"
            )
        if self.format != "fp32" and block is None:
            raise UserError(
                f"granularity {self.granularity} was asked with {self.format} scales, which need blocks such as 1x32; "
                "power-of-two scales of whole rows or tensors are format fp32 with rule amax_pow2"
            )
        if not 0.0 <= self.amax_floor <= _MOST:
            raise UserError(f"amax_floor is {self.amax_floor}, but must be 0 or a positive number up to 2^63")
        if self.format != "fp32" and self.amax_floor:
            raise UserError(f"amax_floor {self.amax_floor} has no effect on {self.format} scales; leave it at 0")
        if self.rounding == "stochastic" and self.format not in CODED_SCALE_FORMATS:
            raise UserError(
                f"rounding stochastic was asked for {self.format} scales, whose rules round only one way; "
                f"use format {', '.join(CODED_SCALE_FORMATS)}, or leave it out"
            )
        for name, default in (("block_target", None), ("four_over_six", None), ("zero_code", "zero")):
            if (value := getattr(self, name)) != default and self.format not in CODED_SCALE_FORMATS:
                raise UserError(
                    f"{name} {value} was asked for {self.format} scales; it belongs to format "
                    f"{', '.join(CODED_SCALE_FORMATS)}: use one of them, or leave it out"
                )
        if self.block_target is not None and not _LEAST <= self.block_target <= _MOST:
            raise UserError(
                f"block_target is {self.block_target}, but must be a positive number such as 4.0, or null; {_RANGE}"
            )


@dataclass(frozen=True)
class TensorScaleSpec:
    """fp32 scale above the blocks' coded scales: G = target / amax, decode scale 1 / G.

    ``QuantSpec.scaling`` names the source of the whole tensor's amax: the tensor, over all ranks that hold parts of it,
    or a history.

    Attributes:
        target: amax of what was scaled: the largest block scale times the largest element, 448 * 6 = 2688 for NVFP4,
            256 * 6 for four-over-six.
        granularity: ``"tensor"``, one scale; or outer blocks ``"RxC"`` of whole inner ones (1x128, arXiv 2510.27527).
    """

    target: float
    granularity: str = "tensor"

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            block = granularity_of(self.granularity).block
        except ValueError:
            block = None
        if block is None and self.granularity != "tensor":
            raise UserError(
                f"granularity is {self.granularity!r}, but must be tensor or ROWSxCOLUMNS such as 1x128, of up to 2^20 "
                "entries"
            )
        if not _LEAST <= self.target <= _MOST:
            raise UserError(f"target is {self.target}, but must be a positive number such as 2688.0; {_RANGE}")


@dataclass(frozen=True, init=False)
class QuantSpec:
    """Quantization of one operand of one GEMM.

    ``granularity``, ``scale_format``, ``scale_rule`` and ``amax_floor`` are the scale's fields, as shorthand arguments
    of the constructor and of ``dataclasses.replace``, and as properties. In the constructor they may not contradict
    ``scale``; in ``replace`` they change it.

    Attributes:
        format: element format, a key of ``formats.ELEMENT_FORMATS``.
        scale: scales of the blocks.
        tensor_scale: fp32 scale above coded ones; None for no such level.
        rounding: ``"nearest_even"``, ``"half_away"`` (microxcaling's default) or ``"stochastic"``.
        random_bits: bits of each draw of stochastic rounding, 1 to 16.
        headroom: factor on the scaled value before rounding. Algorithm 2 of arXiv 2502.20586 uses 3/4, so that nothing
            saturates under the floor rule; the GEMM's accumulator is multiplied by the reciprocal of both operands'
            product.
        scaling: source of the tensor's amax, which the scale of granularity ``"tensor"`` or the tensor scale takes:
            ``"current"``, the tensor itself; ``"delayed"``, the ``history`` of earlier steps (TE).
        history: length of delayed scaling's window.
        history_rule: ``"max"`` over the window, its ``"most_recent"`` entry, or ``"held"``: one entry in ``history``
            is taken and stays in effect until the next (arXiv 2509.17791: 50 steps).
        history_update: one entry per ``"step"``, the largest amax of its microbatches; or one per ``"microbatch"``, as
            in TE: the window then spans ``history`` / microbatches steps, and the scale changes within a step.
        margin: delayed scaling uses M / 2^margin for M, or target / 2^margin for the target.
        source: ``"fprop"`` in dgrad and wgrad quantizes the dequantized operand of fprop again (arXiv 2601.22813),
            instead of the ``"original"`` tensor.
        correction: ``"eden"``: each group of the GEMM's Hadamard transform has a factor <v, v> / <v, q>, v its scaled
            entries and q those rounded, on the scales of its blocks, which are rounded to nearest before and by
            ``scale.rounding`` after it (MS-EDEN, arXiv 2601.22813). None for no factor.
    """

    format: str
    scale: ScaleSpec
    tensor_scale: TensorScaleSpec | None = None
    rounding: Rounding = "nearest_even"
    random_bits: int = 16
    headroom: float = 1.0
    scaling: Scaling = "current"
    history: int = 1024
    history_rule: HistoryRule = "max"
    history_update: HistoryUpdate = "step"
    margin: int = 0
    source: Source = "original"
    correction: Correction | None = None

    def __init__(
        self,
        format: str,
        granularity: str | None = None,
        scale_format: str | None = None,
        scale_rule: str | None = None,
        rounding: Rounding = "nearest_even",
        random_bits: int = 16,
        headroom: float = 1.0,
        amax_floor: float | None = None,
        scaling: Scaling = "current",
        history: int = 1024,
        history_rule: HistoryRule = "max",
        history_update: HistoryUpdate = "step",
        margin: int | None = None,
        *,
        scale: ScaleSpec | None = None,
        tensor_scale: TensorScaleSpec | None = None,
        source: Source = "original",
        correction: Correction | None = None,
    ) -> None:
        given = {"granularity": granularity, "format": scale_format, "rule": scale_rule, "amax_floor": amax_floor}
        shorthand: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if scale is None and granularity is None:
            raise UserError("an operand lacks its scale: give granularity, such as 1x32, or scale=ScaleSpec(...)")
        # dataclasses.replace gives every field, margin too, and shorthand changes the scale
        if scale is not None and margin is None:
            for name, value in shorthand.items():
                if value != getattr(scale, name):
                    raise UserError(
                        f"both {value} and {getattr(scale, name)} were given as scale.{name}: give one of them"
                    )
        with named_place("scale"):
            scale = ScaleSpec(**shorthand) if scale is None else replace(scale, **shorthand) if shorthand else scale
        margin = margin or 0
        fields = locals()
        for name in type(self).__dataclass_fields__:
            object.__setattr__(self, name, fields[name])
        self._check()

    def _check(self) -> None:
        check_fields(self)
        if self.format not in ELEMENT_FORMATS:
            raise UserError(f"format is {self.format!r}, but must be one of {', '.join(ELEMENT_FORMATS)}")
        if not 1 <= self.random_bits <= 16:
            raise UserError(f"random_bits is {self.random_bits}, but a draw has 1 to 16 bits")
        if not _LEAST <= self.headroom <= 1.0:
            raise UserError(f"headroom is {self.headroom}, but must lie above 0 and not above 1; {_RANGE}")
        coded = self.scale_format in CODED_SCALE_FORMATS
        if coded and (bits := _significant_bits(self.format, self.scale_format)) > _EXACT_BITS:
            raise UserError(
                f"{self.format} elements have {bits} bits under {self.scale_format} scales, but bf16 holds "
                f"{_EXACT_BITS}: use a narrower format, or fp32 or e8m0 scales"
            )
        if self.tensor_scale is not None and not coded:
            raise UserError(
                f"tensor_scale was asked above {self.scale_format} scales; it belongs above "
                f"{', '.join(CODED_SCALE_FORMATS)}: set one of them as scale.format, or tensor_scale=null"
            )
        self._check_coded()
        if not 0 <= self.margin <= 63 or (self.margin and self.scaling != "delayed"):
            raise UserError(f"margin {self.margin} was asked; it is a number from 0 to 63, for scaling delayed only")
        if self.scaling == "delayed" and not self.has_tensor_amax:
            raise UserError(
                f"scaling delayed was asked with granularity {self.granularity} and {self.scale_format} scales; a "
                "history is kept for granularity tensor with fp32 scales, or for a tensor_scale: use scaling current"
            )
        if self.history_rule == "held" and self.scaling != "delayed":
            raise UserError(
                "history_rule held was asked with scaling current, which keeps no history: set scaling=delayed, or "
                "history_rule=max"
            )
        if not 1 <= self.history <= 1 << 20:
            raise UserError(f"history is {self.history}, but must be at least 1 and at most 2^20")

    def _check_coded(self) -> None:
        """Check what depends on both the elements and the levels of coded scales."""
        block, outer = self.block, self.outer_block
        if outer is not None and block is not None and (outer[0] % block[0] or outer[1] % block[1]):
            raise UserError(
                f"tensor_scale.granularity is {outer[0]}x{outer[1]}, which does not hold whole blocks of "
                f"{self.granularity}: give multiples of both sizes, such as {block[0]}x{8 * block[1]}"
            )
        if self.scale_format in CODED_SCALE_FORMATS:
            self._check_range()
        if self.scale.rule == "divided" and self.tensor_scale is None:
            raise UserError("scale.rule divided was asked without a tensor_scale to divide by: set tensor_scale.target")
        if self.scale.four_over_six is not None and self.format != "e2m1":
            raise UserError(
                f"scale.four_over_six was asked for {self.format} elements, which have no 4 beside their 6: use format "
                "e2m1, or leave it out"
            )
        if self.correction is not None and (block is None or block[0] != 1 or self.scale.zero_code != "one"):
            raise UserError(
                f"correction {self.correction} was asked with {self.granularity} {self.scale_format} scales and "
                f"zero_code {self.scale.zero_code}; it corrects coded scales of one row that are not 0: set "
                "granularity 1x16, scale_format e4m3 and scale.zero_code one"
            )
        chosen = "scale.four_over_six" if self.scale.four_over_six else "correction" if self.correction else None
        if chosen and self.headroom != 1.0:
            raise UserError(f"headroom {self.headroom} was asked with {chosen}; set scale.block_target instead")

    def _check_range(self) -> None:
        """Refuse coded scales that saturate at the amax, or are 0 there; without a scale above, where it is 1."""
        scales, elements, above = FORMATS[self.scale_format], FORMATS[self.format], self.tensor_scale
        target = 1.0 if above is None else above.target * 2.0**-self.margin
        # peers have block targets below the elements' maximum under that maximum's target too
        most = scales.max * max(elements.max, self.scale.block_target or 0.0)
        zeros_up_to = (self.scale.block_target or elements.max) * scales.smallest / 2
        if self.scale.zero_code != "one" and target <= zeros_up_to:
            if above is None:
                raise UserError(
                    f"{self.format} elements were asked under {self.scale_format} scales alone, where a block of amax "
                    f"1 has scale 0: set tensor_scale.target, {most} at most, or another scale.format"
                )
            raise UserError(
                f"tensor_scale.target is {above.target}, which gives blocks of {self.format} elements the "
                f"{self.scale_format} scale 0: set a target above {zeros_up_to * 2.0**self.margin}"
            )
        if above is not None and target > most:
            raise UserError(
                f"tensor_scale.target is {above.target}, but {self.scale_format} scales of {self.format} elements "
                f"reach {most}, and larger blocks would saturate: set tensor_scale.target={most}"
            )

    def with_current_scaling(self) -> QuantSpec:
        """The spec whose tensor amax is the tensor's own."""
        return replace(self, scaling="current", history_rule="max", margin=0)

    @cached_property
    def granularity(self) -> str:
        """Of the scale."""
        return self.scale.granularity

    @property
    def scale_format(self) -> str:
        """Format of the scale."""
        return self.scale.format

    @property
    def scale_rule(self) -> str:
        """Rule of the scale."""
        return self.scale.rule

    @property
    def amax_floor(self) -> float:
        """Of the scale."""
        return self.scale.amax_floor

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) of a block, columns along the contracted dimension; None for ``tensor`` and ``row``."""
        return granularity_of(self.scale.granularity).block

    @cached_property
    def outer_block(self) -> tuple[int, int] | None:
        """(rows, columns) under one scale above the blocks' own; None for the whole tensor, or no such scale."""
        return None if self.tensor_scale is None else granularity_of(self.tensor_scale.granularity).block

    @cached_property
    def power_of_two_scale(self) -> bool:
        """Whether every decode scale of a block is a power of two."""
        return SCALE_RULES[self.scale.rule].power_of_two

    @cached_property
    def folds_scale(self) -> bool:
        """Whether an element times its block's scale is exact in bf16, but for its range: power-of-two or coded."""
        return self.power_of_two_scale or self.scale.format in CODED_SCALE_FORMATS

    @property
    def sum_width(self) -> int | None:
        """Entries along the contracted dimension in a partial sum that a scale multiplies; None if none does."""
        scaled = self.outer_block or (None if self.folds_scale else self.block)
        return None if scaled is None else scaled[1]

    @property
    def shares_directions(self) -> bool:
        """Whether the transpose has the same codes and scales: of the tensor or of squares, by no order of sums."""
        square = all(block[0] == block[1] for block in (self.block, self.outer_block) if block is not None)
        whole = self.granularity == "tensor" or self.block is not None
        return whole and square and self.scale.four_over_six in (None, "abs_max")

    @property
    def has_tensor_amax(self) -> bool:
        """Whether a scale follows from the amax of the whole tensor."""
        return self.scale.granularity == "tensor" or (self.tensor_scale is not None and self.outer_block is None)

    @cached_property
    def random(self) -> bool:
        """Whether elements or scales are rounded stochastically."""
        return "stochastic" in (self.rounding, self.scale.rounding)


def _significant_bits(element: str, scale: str) -> int:
    return FORMATS[element].significant_bits + FORMATS[scale].significant_bits
