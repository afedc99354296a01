"""The driver's optimizers, one row each. No torch: the memory plan and the options' checks read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.recipe import Recipe


def _muon(groups: list[Any], defaults: Mapping[str, Any], matrices: list[Any], options: Mapping[str, Any]) -> Any:
    from megatron_lowprec.optimizer.muon import Muon

    own = {{"num_ns_steps": "ns_steps"}.get(name, name): value for name, value in options.items()}
    rate, _ = own.pop("lr", None), own.pop("no_split_qkv", None)  # the latter is of the matrices
    ratio = 1.0 if rate is None else rate / defaults["lr"]
    adam = {name: defaults[name] for name in ("lr", "weight_decay", "betas", "eps")}
    return Muon(groups, matrices, **adam, **own, lr_ratio=ratio)


def _sgd(groups: list[Any], defaults: Mapping[str, Any], _: list[Any], options: Mapping[str, Any]) -> Any:
    from torch.optim import SGD

    own = {"momentum": 0.9} | dict(options)
    return SGD(groups, lr=defaults["lr"], weight_decay=defaults["weight_decay"], **own)


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer.

    Attributes:
        summary: for the help.
        matrix_state: fp32 tensors of a matrix's state beside its main weight: of a weight that is neither vector,
            embedding nor output layer.
        other_state: those of another weight.
        whole_matrices: an update needs whole matrices.
        build: from the groups of weights, AdamW's options, the matrices (``optimizer/muon.py``) and the values of own
            options without prefix, of which any may be left out. None: Megatron-core's, which is TransformerEngine's or
            apex's where installed.
    """

    summary: str
    matrix_state: tuple[str, ...]
    other_state: tuple[str, ...]
    whole_matrices: bool = False
    build: Callable[[list[Any], Mapping[str, Any], list[Any], Mapping[str, Any]], Any] | None = None


_ADAM = ("exp_avg", "exp_avg_sq")

OPTIMIZERS: dict[str, OptimizerRow] = {
    "adam": OptimizerRow("AdamW", _ADAM, _ADAM),
    "muon": OptimizerRow(
        "torch's Muon for matrices, AdamW for embeddings, output layer and vectors",
        ("momentum_buffer",),
        _ADAM,
        whole_matrices=True,
        build=_muon,
    ),
    "sgd": OptimizerRow(
        "SGD with momentum; weight decay is added to the gradient",
        ("momentum_buffer",),
        ("momentum_buffer",),
        build=_sgd,
    ),
}


def check_recipe(name: str, recipe: Recipe) -> None:
    """Raise a UserError for a recipe with a state of its own, which only AdamW has."""
    if recipe.optimizer.quantized and name != "adam":
        raise UserError(
            f"recipe {recipe.name} stores AdamW's moments in {', '.join(recipe.optimizer.formats.values())}, and the "
            f"optimizer is {name}: use --optimizer adam, or a recipe without optimizer state such as fp8_lm_o1"
        )
