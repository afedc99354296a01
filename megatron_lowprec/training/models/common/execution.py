"""What a part of an architecture reads of the execution of its layers; ``training/memory/layout.py`` has it."""

from __future__ import annotations

from typing import Protocol

from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import LinearRecipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.options.training_options import TrainingOptions


class Execution(Protocol):
    """A recipe on a device, without the device."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of one phase."""

    @property
    def fused(self) -> bool:
        """Whether dropout, rope and cross entropy are fused kernels."""

    def linear(self, config: Config, layer: int, name: str) -> LinearRecipe:
        """What a linear layer runs."""

    def keeps_codes(self, config: Config, layer: int, name: str) -> bool:
        """Whether a linear layer saves FP8 codes of its input."""

    def computes_again(self, config: Config, layer: int, name: str) -> bool:
        """Whether a linear layer computes its input again in the backward pass."""

    def casts_again(self, config: TrainingOptions) -> bool:
        """Whether linear_proj saves no codes beside attention's output."""

    def recomputes_gelu(self, config: Config) -> bool:
        """Whether the input of linear_fc2 is computed again in the backward pass."""
