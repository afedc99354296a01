"""What TransformerEngine computes, as fields of recipes: the table that every translation to it reads; pure functions.

TransformerEngine gives each tensor of a linear layer one quantizer, with one operand for each of its two GEMMs:

    ===========  =======  ==========
    tensor       rowwise  columnwise
    ===========  =======  ==========
    input        fprop    wgrad
    weight       fprop    dgrad
    grad_output  dgrad    wgrad
    ===========  =======  ==========

A recipe's name is never used: its data are compared, operand by operand. Source: TransformerEngine 2.20.2,
``common/recipe`` and, in ``pytorch``, ``quantization``, ``module/linear`` and ``cpp_extensions/gemm``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from megatron_lowprec.recipe.recipe import BF16, Recipe, Rule
from megatron_lowprec.recipe.registry import NVFP4, NVFP4_16X16, NVFP4_HADAMARD, NVFP4_SR
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, QuantSpec

TESTED_VERSION = "2.20.2"
INSTALL = f"pip install --no-build-isolation 'transformer-engine[pytorch]=={TESTED_VERSION}'"

Kind = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
"""A kind of scaling, by Megatron-core's name in ``--fp8-recipe`` or ``--fp4-recipe``."""


@dataclass(frozen=True)
class ScalingKind:
    """One kind of scaling of TransformerEngine.

    Attributes:
        recipe_class: recipe with this scaling for all tensors, in ``transformer_engine.common.recipe``.
        granularities: those of ``QuantSpec`` that the quantizer has.
        scale_rules: those of ``QuantSpec``.
        amax_floor: whether the quantizer has a smallest amax (``amax_epsilon``).
        multiple: the GEMMs need features and tokens in multiples of this.
    """

    recipe_class: str
    granularities: tuple[str, ...]
    scale_rules: tuple[str, ...]
    amax_floor: bool = False
    multiple: int = 16


KINDS: dict[Kind, ScalingKind] = {
    "delayed": ScalingKind("DelayedScaling", ("tensor",), ("amax",)),
    "tensorwise": ScalingKind("Float8CurrentScaling", ("tensor",), ("amax", "amax_pow2"), amax_floor=True),
    "blockwise": ScalingKind("Float8BlockScaling", ("1x128", "128x128"), ("amax", "amax_pow2"), amax_floor=True),
    "mxfp8": ScalingKind("MXFP8BlockScaling", ("1x32", "32x32"), ("round_up",), multiple=32),
    "nvfp4": ScalingKind("NVFP4BlockScaling", ("1x16", "16x16"), ("product",)),
}
_NATIVE_ON_BLACKWELL = ("mxfp8", "nvfp4")
_DIRECTIONS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
_FORMATS = ("e4m3", "e5m2")


class Directions(NamedTuple):
    """A tensor's operand in each of its two GEMMs; None in the compute dtype."""

    rowwise: QuantSpec | None
    columnwise: QuantSpec | None


def directions(recipe: Recipe) -> dict[str, Directions]:
    """Tensor (input, weight, grad_output) -> its operands."""
    return {
        tensor: Directions(getattr(recipe.gemms[rowwise], tensor), getattr(recipe.gemms[columnwise], tensor))
        for tensor, (rowwise, columnwise) in _DIRECTIONS.items()
    }


def kind_of(quant: QuantSpec) -> Kind:
    """Kind of scaling with this granularity, of an operand that TransformerEngine has."""
    if quant.scaling == "delayed":
        return "delayed"
    return next(kind for kind, row in KINDS.items() if kind != "delayed" and quant.granularity in row.granularities)


def kinds_of(recipe: Recipe) -> set[Kind]:
    """All kinds of scaling of a recipe that TransformerEngine has."""
    return {kind_of(quant) for pair in directions(recipe).values() for quant in pair if quant is not None}


def quantizes_backward(recipe: Recipe) -> bool:
    """Whether dgrad or wgrad is quantized."""
    return recipe.dgrad.quantized or recipe.wgrad.quantized


def why_not(recipe: Recipe) -> str | None:
    """Reason why TransformerEngine has no quantizers that compute the recipe's GEMMs; None if it has.

    Rules and phases are not considered (``by_place_or_time``): TransformerEngine's recipes say nothing about layers.
    """
    if recipe.changes_training:
        return "it also quantizes optimizer state, gradients or weights, which are no part of a recipe there"
    if recipe.activations.quantized:
        return "it also quantizes saved activations, which only this project's layers do"
    reasons = [_gemm_fault(name, gemm) for name, gemm in recipe.gemms.items()]
    reasons += [_delayed_fault(recipe), _nvfp4_fault(recipe)]
    found = next((reason for reason in reasons if reason is not None), None)
    if found is None and builtin_kind(recipe) != "tensorwise":
        found = accumulation_fault(recipe)
    return found


def by_place_or_time(recipe: Recipe) -> str | None:
    """What of the recipe depends on the layer or the step, which no quantizer and no recipe class sees; None if not."""
    if recipe.phases:
        return "phases need the step of the training"
    return "rules need the layer's number" if recipe.all_rules else None


def bf16_ends(recipe: Recipe) -> tuple[int, int] | None:
    """Transformer layers in bf16 at the beginning and at the end, if the recipe has no other rules and no phases."""
    ends = [rule for rule in recipe.all_rules if rule == Rule.of(BF16, first=rule.first, last=rule.last)]
    if recipe.phases or len(ends) < len(recipe.all_rules) or any(not (rule.first or rule.last) for rule in ends):
        return None
    return max((rule.first or 0 for rule in ends), default=0), max((rule.last or 0 for rule in ends), default=0)


def builtin_kind(recipe: Recipe) -> Kind | None:
    """The kind whose recipe class computes the whole recipe, None if it needs a quantizer factory.

    Args:
        recipe: one that TransformerEngine has quantizers for.
    """
    tensors = directions(recipe)
    quantized = {name: pair.rowwise for name, pair in tensors.items() if pair.rowwise is not None}
    kinds = kinds_of(recipe)
    alike = not quantizes_backward(recipe) or all(pair.rowwise == pair.columnwise for pair in tensors.values())
    if len(kinds) != 1 or not recipe.fprop.quantized or not alike:
        return None
    (kind,) = kinds
    if {quantized["input"].format, quantized["weight"].format} != {"e2m1" if kind == "nvfp4" else "e4m3"}:
        return None
    if kind == "delayed" and len({_history(quant) for quant in quantized.values()}) > 1:
        return None
    if kind == "mxfp8" and {quantized[name].granularity for name in quantized if name != "weight"} != {"1x32"}:
        return None
    return kind


def fp8_format(recipe: Recipe) -> Literal["hybrid", "e4m3"]:
    """TransformerEngine's format: hybrid has gradients in E5M2, e4m3 everything in E4M3."""
    gradient = directions(recipe)["grad_output"]
    return "hybrid" if any(quant is not None and quant.format == "e5m2" for quant in gradient) else "e4m3"


def _history(quant: QuantSpec) -> tuple[int, str, int]:
    # Its histories have one entry per microbatch; a recipe with one per step still matches.
    return quant.history, quant.history_rule, quant.margin


def _gemm_fault(name: str, gemm: GemmSpec) -> str | None:
    if not gemm.quantized:
        return None
    operands: dict[str, QuantSpec | None] = {operand: getattr(gemm, operand) for operand in GEMM_OPERANDS[name]}
    faults = [_operand_fault(f"{name}.{operand}", quant) for operand, quant in operands.items() if quant is not None]
    fault = next((fault for fault in faults if fault is not None), None)
    if fault is not None:
        return fault
    quants = [quant for quant in operands.values() if quant is not None]
    if gemm.hadamard is not None and not (name == "wgrad" and {kind_of(quant) for quant in quants} == {"nvfp4"}):
        return f"{name} has a Hadamard transform, which only its NVFP4 quantizers have, and only in wgrad"
    if gemm.hadamard not in (None, NVFP4_HADAMARD):
        return f"{name}.hadamard is {gemm.hadamard}, but its quantizers have {NVFP4_HADAMARD}"
    if len(quants) < len(operands):
        return f"{name} has one operand in the compute dtype; its GEMMs quantize both or neither"
    kinds = {kind_of(quant) for quant in quants}
    if len(kinds) > 1 and kinds != {"delayed", "tensorwise"}:  # both have one scale a tensor
        return f"{name} has operands of {' and '.join(sorted(kinds))} scaling, for which it has no GEMM"
    if {quant.format for quant in quants} == {"e5m2"}:
        return f"{name} has two E5M2 operands, for which it has no GEMM"
    if {quant.granularity for quant in quants} == {"128x128"}:
        return f"{name} has two operands of 128x128, for which it has no GEMM"
    return None


def _operand_fault(place: str, quant: QuantSpec) -> str | None:
    if quant.format == "e2m1" and quant.granularity in KINDS["nvfp4"].granularities:
        return _nvfp4_operand_fault(place, quant)
    if quant.format not in _FORMATS:
        return f"{place}.format is {quant.format}, but its quantizers have e4m3, e5m2 and NVFP4"
    if (quant.rounding, quant.headroom) != ("nearest_even", 1.0):
        asked = f"rounding {quant.rounding} and headroom {quant.headroom:g}"
        return f"{place} has {asked}, but its FP8 casts have nearest_even and 1"
    if quant.history_rule == "held":
        return f"{place}.history_rule is held, but its histories have max and most_recent"
    if quant.source != "original":
        return f"{place}.source is {quant.source}, but its FP8 casts take the original tensor"
    of_fp8 = [(kind, row) for kind, row in KINDS.items() if kind != "nvfp4"]
    rows = [row for kind, row in of_fp8 if (kind == "delayed") == (quant.scaling == "delayed")]
    matching = next((row for row in rows if quant.granularity in row.granularities), None)
    if matching is None:
        known = ", ".join(granularity for row in rows for granularity in row.granularities)
        return f"{place}.granularity is {quant.granularity}, but its quantizers have {known}"
    if quant.scale_rule not in matching.scale_rules:
        rules = " and ".join(matching.scale_rules)
        return f"{place}.scale_rule is {quant.scale_rule}, but {matching.recipe_class} has {rules}"
    if quant.amax_floor and not matching.amax_floor:
        return f"{place}.amax_floor is {quant.amax_floor:g}, but {matching.recipe_class} has none"
    return None


def _nvfp4_operand_fault(place: str, quant: QuantSpec) -> str | None:
    """The first field that differs: blocks of 16x16 are the weight's, and stochastic rounding is the gradient's."""
    if (chosen := quant.scale.four_over_six) is not None:
        where = "only outside of its pre-training recipe: without Hadamard transform and stochastic rounding"
        return f"{place}.scale.four_over_six is {chosen}, which its NVFP4 quantizers have {where}"
    tensor = place.partition(".")[2]
    drawn = tensor == "grad_output" and quant.rounding == "stochastic"
    square = tensor == "weight" and quant.granularity == "16x16"
    wanted = NVFP4_SR if drawn else NVFP4_16X16 if square else NVFP4
    ours, theirs = _fields(quant), _fields(wanted)
    for field in {**theirs, **ours}:
        if (value := ours.get(field)) != (known := theirs.get(field)):
            return f"{place}.{field} is {value}, but its NVFP4 quantizers have {known}"
    return None


def _fields(quant: QuantSpec) -> dict[str, Any]:
    """Field, such as ``scale.rule``, -> value; bits are those of stochastic rounding."""
    quant = replace(quant, random_bits=quant.random_bits if quant.rounding == "stochastic" else NVFP4.random_bits)
    nested = {name: value if isinstance(value, dict) else {"": value} for name, value in asdict(quant).items()}
    return {f"{name}.{field}".rstrip("."): value for name, each in nested.items() for field, value in each.items()}


def _nvfp4_fault(recipe: Recipe) -> str | None:
    """NVFP4 is translated to its recipe class; its quantizers in a factory are not."""
    quants = [quant for pair in directions(recipe).values() for quant in pair if quant is not None]
    if all(quant.format != "e2m1" for quant in quants) or builtin_kind(recipe) == "nvfp4":
        return None
    return "it has NVFP4 in some operands only, or in two ways in one tensor, for which it has no recipe class"


def _delayed_fault(recipe: Recipe) -> str | None:
    """A quantizer with a history serves both GEMMs of its tensor; those of one pass share their parameters."""
    tensors = directions(recipe)
    for tensor, pair in tensors.items():
        delayed = any(quant is not None and quant.scaling == "delayed" for quant in pair)
        if delayed and pair.rowwise != pair.columnwise:
            return f"{tensor} has delayed scaling, but not the same in {' and '.join(_DIRECTIONS[tensor])}"
    forward = [
        quant
        for tensor in ("input", "weight")
        if (quant := tensors[tensor].rowwise) is not None and quant.scaling == "delayed"
    ]
    if len({_history(quant) for quant in forward}) > 1:
        return "input and weight have delayed scaling with other history, history_rule or margin"
    if any(quant.format != "e4m3" for quant in forward):
        return "input or weight has delayed scaling in e5m2; its forward pass has e4m3"
    return None


def accumulation_fault(recipe: Recipe) -> str | None:
    """Reason why the recipe accumulates in another way than all recipe classes but Float8CurrentScaling; None if not.

    Without that class's choice, fprop of tensor scales is fast, and blocks never are.
    """
    for name, gemm in recipe.gemms.items():
        quant: QuantSpec | None = getattr(gemm, GEMM_OPERANDS[name][0])
        # fast accumulation exists on Ada and Hopper, MXFP8 and NVFP4 from Blackwell on
        if quant is None or kind_of(quant) in _NATIVE_ON_BLACKWELL:
            continue
        fast = name == "fprop" and kind_of(quant) != "blockwise"
        if gemm.fast_accumulation != fast:
            return f"{name}.fast_accumulation is {_yaml(not fast)}, but {_yaml(fast)} in its GEMMs of these scales"
    return None


def _yaml(value: bool) -> str:
    return str(value).lower()
