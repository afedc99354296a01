"""A recipe as the fields of Megatron-core's TransformerConfig that select one of TransformerEngine's recipe classes.

Megatron-core has fewer fields than the classes: scales are the same for all tensors, and a smallest amax, other blocks
and accumulation are missing. A quantizer factory (``factory``) expresses these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import RecipeLike, as_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.recipe.schema import QuantSpec
from megatron_lowprec.te.translation import (
    Kind,
    bf16_ends,
    builtin_kind,
    directions,
    fp8_format,
    quantizes_backward,
    why_not,
)


@dataclass(frozen=True)
class TEConfig:
    """One of TransformerEngine's recipes by Megatron-core's fields, or bf16.

    Attributes:
        kind: Megatron's ``--fp8-recipe``; None for bf16.
        format: Megatron's ``--fp8-format``: hybrid has gradients in E5M2, e4m3 everything in E4M3.
        history, history_rule, margin: of delayed scaling.
        power_of_two: whether scales are powers of two; from the environment in ``tensorwise`` and ``blockwise``.
        first_layers, last_layers: number of transformer layers kept in bf16 at each end.
    """

    kind: Kind | None = None
    format: Literal["hybrid", "e4m3"] = "e4m3"
    history: int = 1
    history_rule: str = "most_recent"
    margin: int = 0
    power_of_two: bool = False
    first_layers: int = 0
    last_layers: int = 0

    def transformer_config(self) -> dict[str, Any]:
        """Fields of Megatron-core's ``TransformerConfig``."""
        if self.kind is None:
            return {}
        fields: dict[str, Any] = {"fp8": self.format, "fp8_recipe": self.kind}
        if self.kind == "delayed":
            fields |= {
                "fp8_margin": self.margin,
                "fp8_amax_history_len": self.history,
                "fp8_amax_compute_algo": self.history_rule,
            }
        if self.first_layers or self.last_layers:
            fields |= {
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": self.first_layers,
                "num_layers_at_end_in_bf16": self.last_layers,
            }
        return fields

    def environment(self) -> dict[str, str]:
        """Environment variables that TransformerEngine's recipes read at import for their kind of scales."""
        return {
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": str(int(self.kind == "tensorwise" and self.power_of_two)),
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": str(int(self.kind == "blockwise" and not self.power_of_two)),
        }

    def flags(self) -> str:
        """Megatron-LM's flags, after the environment variables that must be set."""
        words = [f"{name}=1" for name, value in self.environment().items() if value == "1"]
        for name, value in self.transformer_config().items():
            words.append("--fp8-format" if name == "fp8" else "--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
        return " ".join(words)

    def __str__(self) -> str:
        if self.kind is None:
            return "bf16"
        words = [f"--fp8-format {self.format} --fp8-recipe {self.kind}"]
        if self.kind == "delayed":
            words.append(f"amax {self.history_rule} of {self.history} microbatches, margin {self.margin}")
        else:
            words.append("power-of-two scales" if self.power_of_two else "fp32 scales")
        if self.first_layers or self.last_layers:
            words.append(f"first {self.first_layers} and last {self.last_layers} layers in bf16")
        return ", ".join(words)


def te_config(recipe: RecipeLike) -> TEConfig:
    """The fields for ``recipe``.

    Raises:
        UserError: Megatron-core's fields do not express it, with the reason.
    """
    recipe = as_recipe(recipe)
    reason = _why_no_fields(recipe)
    if reason is None:
        return _fields(recipe)
    shared = ", ".join(name for name in recipes() if _why_no_fields(get_recipe(name)) is None)
    raise UserError(
        f"--recipe {recipe.name} does not run with TransformerEngine's layers: {reason}; choose one of {shared} (which "
        "of their fields may differ: docs/guide/transformer-engine.md), or --transformer-impl local"
    )


def find_te_config(recipe: Recipe) -> TEConfig | None:
    """As ``te_config``; None where that raises."""
    return _fields(recipe) if _why_no_fields(recipe) is None else None


def _fields(recipe: Recipe) -> TEConfig:
    operand, ends = recipe.fprop.input, bf16_ends(recipe)
    assert ends is not None
    if operand is None:
        return TEConfig()
    kind = builtin_kind(recipe)
    delayed = kind == "delayed"
    return TEConfig(
        kind,
        fp8_format(recipe),
        history=operand.history if delayed else 1,
        history_rule=operand.history_rule if delayed else "most_recent",
        margin=operand.margin,
        power_of_two=operand.power_of_two_scale,
        first_layers=ends[0],
        last_layers=ends[1],
    )


def _why_no_fields(recipe: Recipe) -> str | None:
    """Reason why Megatron-core's fields do not express the recipe; None if they do."""
    reason = why_not(recipe)
    if reason is not None:
        return f"in TransformerEngine, {reason}"
    if not recipe.quantized:
        return None
    kind, ends = builtin_kind(recipe), bf16_ends(recipe)
    if kind == "nvfp4":
        return "Megatron-core's FP8 fields have no NVFP4, and the driver does not set its FP4 fields"
    if kind is None or not quantizes_backward(recipe):
        return "Megatron-core's fields have one kind of scaling, for all tensors and all GEMMs"
    if ends is None:
        return "Megatron-core's fields keep the first and last layers in bf16, and have no other rules and no phases"
    if kind == "delayed" and any(ends):
        return "Megatron-core refuses layers in bf16 under delayed scaling"
    quants = {name: pair.rowwise for name, pair in directions(recipe).items() if pair.rowwise is not None}
    found = {name: (quant.granularity, quant.scale_rule, quant.amax_floor) for name, quant in quants.items()}
    if found != _defaults(kind, quants["input"]):
        return "Megatron-core's fields have one scale_rule for all tensors, no amax_floor and no other granularities"
    fast = {name: gemm.fast_accumulation for name, gemm in recipe.gemms.items()}
    if kind == "tensorwise" and fast != {"fprop": True, "dgrad": False, "wgrad": False}:
        return "Megatron-core's fields do not set fast_accumulation"
    return None


def _defaults(kind: Kind, quant: QuantSpec) -> dict[str, tuple[str, str, float]]:
    """Tensor -> granularity, scale rule and smallest amax of the class that Megatron-core builds."""
    granularity = {"blockwise": "1x128", "mxfp8": "1x32"}.get(kind, "tensor")
    default = (granularity, quant.scale_rule, 0.0)
    weight = ("128x128", *default[1:]) if kind == "blockwise" else default
    return {"input": default, "weight": weight, "grad_output": default}
