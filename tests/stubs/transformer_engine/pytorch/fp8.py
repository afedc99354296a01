"""The FP8 contexts, entered and left but without effect on any product."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformer_engine.common.recipe import Recipe


class FP8GlobalStateManager:
    recipe: Recipe | None = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None


def is_fp8_available(return_reason: bool) -> tuple[bool, str]:
    return True, ""


def is_fp8_block_scaling_available(return_reason: bool) -> tuple[bool, str]:
    return "TE_STAND_IN_NO_BLOCKS" not in os.environ, "FP8 block scaled GEMM requires CUDA >= 12.9."


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    before = FP8GlobalStateManager.recipe
    FP8GlobalStateManager.recipe = fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    yield
