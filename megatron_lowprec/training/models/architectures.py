"""Architectures of the driver, one folder each, and the selection by a configuration."""

from __future__ import annotations

from dataclasses import fields

from megatron_lowprec.training.config.options import Config, ModelOptions
from megatron_lowprec.training.models.common.interface import Architecture
from megatron_lowprec.training.models.deepseek.architecture import DEEPSEEK, LATENT
from megatron_lowprec.training.models.gpt2.architecture import GPT2
from megatron_lowprec.training.models.llama.architecture import LLAMA, RELATIVES
from megatron_lowprec.training.models.moe.architecture import MOE

ARCHITECTURES: tuple[Architecture, ...] = (DEEPSEEK, LATENT, MOE, LLAMA, *RELATIVES, GPT2)
"""The first architecture that a configuration selects is used; the last one matches any."""


def architecture_of(config: Config) -> Architecture:
    """The architecture that the options select."""
    return next(architecture for architecture in ARCHITECTURES if architecture.selected(config))


_IMPLEMENTATION = ("transformer_impl", "attention_backend", "use_cpu_initialization")


def model_options(config: Config) -> list[str]:
    """Names of the options that describe a model, independent of the layer implementation."""
    architecture = architecture_of(config)
    shared = [option.name for option in fields(ModelOptions) if option.name not in _IMPLEMENTATION]
    return [*shared, *architecture.shape_options, *architecture.function_options]
