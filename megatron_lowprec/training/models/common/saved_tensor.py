"""Tensors that a layer saves for its backward pass, by shape; ``training/memory/`` applies recipe and device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavedTensor:
    """A tensor saved for one microbatch's backward pass, in the compute dtype unless something below changes that.

    Args:
        name: of its term in the memory plan; terms of one name are added.
        entries: on this rank.
        width: bytes of an entry; 0 for the compute dtype's.
        input_of: linear layer whose input it is.
        behind_norm: a norm's output, which the norm's saved input gives again.
        dispatched: tokens that reach their experts as the codes that ``input_of`` takes.
        also_output: the operation that computes it saves it as well, in the compute dtype.
        computed_from: saved tensor that gives it again without a GEMM.
        unfused: a GPU's kernel saves nothing in its place.
        activation: name in a recipe under which it may be saved in a format.
        in_format: name of the term in a format, which replaces ``{}``.
    """

    name: str
    entries: float
    width: int = 0
    input_of: str | None = None
    behind_norm: bool = False
    dispatched: bool = False
    also_output: bool = False
    computed_from: SavedTensor | None = None
    unfused: bool = False
    activation: str | None = None
    in_format: str = ""
