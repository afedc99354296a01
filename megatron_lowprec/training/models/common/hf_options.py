"""Compares options with those of a Hugging Face model's architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.training.config.options import Config


def differing_options(config: Config, options: Mapping[str, Any]) -> list[str]:
    """Options whose values differ, as flags with the configuration's values."""
    return [
        f"--{name.replace('_', '-')} {getattr(config, name)}"
        for name, value in options.items()
        if getattr(config, name) != value
    ]
