"""Architectures of the driver, one folder each, and the selection by a configuration."""

from __future__ import annotations

from megatron_lowprec.training.config.options import Config, options_in
from megatron_lowprec.training.models.common.interface import Architecture
from megatron_lowprec.training.models.deepseek.architecture import DEEPSEEK, LATENT
from megatron_lowprec.training.models.gpt2.architecture import GPT2
from megatron_lowprec.training.models.llama.architecture import LLAMA, QWEN2, QWEN3
from megatron_lowprec.training.models.moe.architecture import MOE
from megatron_lowprec.training.options.declaration import Group, Part
from megatron_lowprec.training.options.model_options import ModelOptions, RopeOptions

ARCHITECTURES: tuple[Architecture, ...] = (DEEPSEEK, LATENT, MOE, LLAMA, QWEN2, QWEN3, GPT2)
"""The first architecture that a configuration selects is used; the last one matches any."""


def architecture_of(config: Config) -> Architecture:
    """The architecture that the options select."""
    return next(architecture for architecture in ARCHITECTURES if architecture.selected(config))


def option_groups(config: Config) -> tuple[type[Group], ...]:
    """The groups of options that the model's architecture reads."""
    return (ModelOptions, RopeOptions, *architecture_of(config).options)


def model_options(config: Config) -> list[str]:
    """Names of the options that describe a model, independent of the layer implementation."""
    of_architecture = options_in(Part.SHAPE, Part.FUNCTION, groups=architecture_of(config).options)
    return [*options_in(*Part, groups=(ModelOptions, RopeOptions)), *of_architecture]
