"""Translates a recipe to the fields that Megatron-core's TransformerConfig has for TransformerEngine.

A recipe's name is never used: its data are compared with TransformerEngine's behavior, operand by operand, so that one
recipe means the same under either implementation. Recipes that TransformerEngine would run differently are rejected.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, GemmSpec, HistoryUpdate, QuantSpec, Recipe
from megatron_lowprec.training.config.fields import require
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.sizes import linear_sites

TESTED_VERSION = "2.20.2"
INSTALL = f"pip install --no-build-isolation 'transformer-engine[pytorch]=={TESTED_VERSION}'"

# Megatron's name of a TransformerEngine recipe -> this project's recipe to compare it with.
_COUNTERPARTS = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "blockwise": "fp8_blockwise"}
# TransformerEngine's GEMMs require features and tokens in multiples of this.
_MULTIPLE = 16


@dataclass(frozen=True)
class TERecipe:
    """One of TransformerEngine's recipes, or bf16.

    Attributes:
        kind: Megatron's ``--fp8-recipe``; None for bf16.
        format: Megatron's ``--fp8-format``: hybrid has gradients in E5M2, e4m3 everything in E4M3.
        history, history_rule, margin: of delayed scaling.
        power_of_two: whether scales are rounded down to powers of two.
        first_layers, last_layers: number of transformer layers kept in bf16 at each end.
    """

    kind: Literal["delayed", "tensorwise", "blockwise"] | None = None
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
        """Environment variables that TransformerEngine's recipes read at import; set only by this project."""
        return {
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": str(int(self.kind == "tensorwise" and self.power_of_two)),
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": str(int(self.kind == "blockwise" and not self.power_of_two)),
        }

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


def te_recipe(recipe: Recipe) -> TERecipe:
    """TransformerEngine's counterpart of ``recipe``.

    Raises:
        UserError: there is none.
    """
    found = _counterpart(recipe)
    if found is not None:
        return found
    shared = ", ".join(name for name in recipes() if _counterpart(get_recipe(name)) is not None)
    raise UserError(
        f"--recipe {recipe.name} does not exist in TransformerEngine, which runs {shared}; choose one of these (which "
        "of their fields may differ: docs/guide/transformer-engine.md), or --transformer-impl local"
    )


def _counterpart(recipe: Recipe) -> TERecipe | None:
    keep, operand, gradient = recipe.keep_bf16, recipe.fprop.input, recipe.dgrad.grad_output
    if recipe.changes_training:
        return None  # uses features of this project's layers
    if not recipe.quantized:
        return TERecipe()
    if operand is None or gradient is None or keep.names:
        return None
    delayed = operand.scaling == "delayed"
    found = TERecipe(
        "delayed" if delayed else "tensorwise" if operand.granularity == "tensor" else "blockwise",
        "hybrid" if gradient.format == "e5m2" else "e4m3",
        history=operand.history if delayed else 1,
        history_rule=operand.history_rule if delayed else "most_recent",
        margin=operand.margin,
        power_of_two=operand.scale_rule == "amax_pow2",
        first_layers=keep.first_layers,
        last_layers=keep.last_layers,
    )
    # TransformerEngine's delayed scaling has one context for all layers and no powers of two; its blocks are E4M3 here.
    impossible = {
        "delayed": found.power_of_two or found.first_layers or found.last_layers,
        "tensorwise": False,
        "blockwise": found.format != "e4m3",
    }
    same = recipe.gemms == _gemms(found, operand.history_update)
    return found if same and not impossible[str(found.kind)] else None


def _gemms(found: TERecipe, history_update: HistoryUpdate) -> dict[str, GemmSpec]:
    """TransformerEngine's GEMMs under ``found``, as recipe fields.

    Its histories have one entry per microbatch; a recipe with one per step still matches.
    """

    def varied(operand: str, spec: QuantSpec) -> QuantSpec:
        spec = replace(spec, scale_rule="amax_pow2" if found.power_of_two else "amax")
        if operand == "grad_output":
            spec = replace(spec, format="e5m2" if found.format == "hybrid" else "e4m3")
        if found.kind == "delayed":
            rule: Any = found.history_rule
            spec = replace(spec, history=found.history, history_rule=rule, margin=found.margin)
            spec = replace(spec, history_update=history_update)
        return spec

    base, gemms = get_recipe(_COUNTERPARTS[str(found.kind)]).gemms, {}
    for gemm, operands in GEMM_OPERANDS.items():
        changes: dict[str, Any] = {operand: varied(operand, getattr(base[gemm], operand)) for operand in operands}
        gemms[gemm] = replace(base[gemm], **changes)
    return gemms


def check(config: Config, recipe: Recipe) -> TERecipe:
    """``te_recipe``, after checking this model's sizes and layout.

    Raises:
        UserError: as ``te_recipe``; features that are no multiple of 16 on a rank; more bf16 layers than a stage has.
    """
    found = te_recipe(recipe)
    if config.recompute_gelu:
        raise UserError("--recompute-gelu is of this project's layers; leave it out, or use --transformer-impl local")
    if found.kind is None:
        if config.fp8_param_gather:
            raise UserError(f"--fp8-param-gather needs an FP8 recipe, not --recipe {recipe.name}; leave it out")
        return found
    for site in linear_sites(config):
        ranks = {"column": (1, config.tensor_model_parallel_size), "row": (config.tensor_model_parallel_size, 1)}
        into, out = ranks[site.split]
        for what, size in (("input", site.in_features // into), ("output", site.out_features // out)):
            if size % _MULTIPLE:
                raise UserError(
                    f"{site.path} has {size} {what} features on a rank, no multiple of {_MULTIPLE}, which "
                    "TransformerEngine's FP8 products want; change that size or use --transformer-impl local"
                )
    stage = require(config.num_layers) // config.pipeline_model_parallel_size
    if max(found.first_layers, found.last_layers) > stage:
        raise UserError(
            f"keep_bf16 asks {found.first_layers} first and {found.last_layers} last layers, but Megatron-core keeps "
            f"at most the {stage} layers of one pipeline stage in bf16; lower keep_bf16.first_layers and last_layers"
        )
    return found


def prepare(config: Config, recipe: Recipe) -> None:
    """Import TransformerEngine with the environment variables for ``recipe``, which it reads at import.

    Call it before any import of Megatron-core, which imports TransformerEngine itself. No-op for
    ``--transformer-impl local``.

    Raises:
        UserError: as ``check``; tokens on a rank that are no multiple of 16; a broken installation.
    """
    if config.transformer_impl != "transformer_engine":
        return
    found = check(config, recipe)
    tokens = require(config.micro_batch_size) * require(config.seq_length) // config.context_parallel_size
    if found.kind is not None and tokens % _MULTIPLE:
        raise UserError(
            f"--micro-batch-size {config.micro_batch_size} x --seq-length {config.seq_length} make {tokens} tokens on "
            f"a rank, no multiple of {_MULTIPLE}, which TransformerEngine's FP8 products want; change one of them"
        )
    os.environ.update(found.environment())
    try:
        # import by this name: transformer_engine itself suppresses errors of its submodules
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise UserError(
            "--transformer-impl transformer_engine: TransformerEngine is installed but cannot be imported: "
            f"{' '.join(str(error).split())[:300]}; install what it names, or use --transformer-impl local"
        ) from None
