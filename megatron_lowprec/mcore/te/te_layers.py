"""TransformerEngine's layers instead of this project's: Megatron-core's own spec, contexts and caches.

Megatron-core enters TransformerEngine's FP8 contexts according to ``TransformerConfig.fp8`` and related fields. It
marks the first microbatch of a step, after which TransformerEngine caches quantized weights. This module adds the rest.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.rng_step import set_rng_step
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.recipe import Recipe

EXTRA_STATE = "_extra_state"
"""Suffix of the state-dict keys of TransformerEngine's extra state: amax histories, as pickled bytes."""
_ALLOW_PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def check_support(fp8_recipe: str) -> None:
    """Check that this GPU and CUDA version run an FP8 recipe, given by Megatron's name.

    Raises:
        UserError: not supported, with TransformerEngine's reason.
    """
    import transformer_engine.pytorch as te

    own = {"blockwise": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available"}
    available, reason = getattr(te, own.get(fp8_recipe, "is_fp8_available"))(return_reason=True)
    if not available:
        raise UserError(
            f"this recipe is TransformerEngine's {fp8_recipe} scaling, which it does not run on this machine: {reason} "
            "Use --recipe bf16 or --transformer-impl local"
        )


def te_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Layer specs with TransformerEngine's norms, attention and linears of this pipeline stage, for ``GPTModel``."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def accumulate_wgrad(model_chunks: Sequence[nn.Module]) -> None:
    """Make TransformerEngine's linears accumulate weight gradients into ``main_grad`` inside the GEMM.

    ``TransformerConfig.gradient_accumulation_fusion`` would make Megatron-core's own output layer require apex.
    """
    for chunk in model_chunks:
        module: Any
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


@contextmanager
def loading_extra_states() -> Iterator[None]:
    """Context in which TransformerEngine unpickles its extra states, which it otherwise refuses.

    They are pickles inside a checkpoint's objects; ``training.checkpoint.safe_load`` must check them first.
    """
    before = os.environ.get(_ALLOW_PICKLE)
    os.environ[_ALLOW_PICKLE] = "1"
    try:
        yield
    finally:
        del os.environ[_ALLOW_PICKLE]
        if before is not None:
            os.environ[_ALLOW_PICKLE] = before


class TERuntime:
    """Counterpart of ``mcore.runtime.RecipeRuntime``; TransformerEngine's own layers need no steps and microbatches.

    Args:
        recipe: the requested recipe.
        runs: TransformerEngine's recipe for it, for the header.
    """

    def __init__(self, recipe: Recipe, runs: str) -> None:
        self.recipe, self._runs, self._step = recipe, runs, 0

    def begin_step(self, step: int) -> None:
        """Set the RNG step, by which routers know their microbatch."""
        self._step = step

    def begin_microbatch(self, index: int) -> None:
        """Likewise; TransformerEngine knows the first microbatch from Megatron-core's schedules."""
        set_rng_step(RngStep(self._step, index))

    def end_step(self, updated: bool = True) -> None:
        """No-op: amax histories are updated when the FP8 context ends, even in a step that is then skipped."""

    def rescale_gradients(self, factor: float) -> bool:
        """No-op: TransformerEngine's histories adapt as their windows advance."""
        return False

    def gemms(self) -> dict[str, str]:
        """GEMM -> how it is executed."""
        return {
            name: f"native, TransformerEngine: {self._runs}" if gemm.quantized else "not quantized"
            for name, gemm in self.recipe.gemms.items()
        }

    def header(self) -> list[str]:
        """Header lines that describe how the recipe runs."""
        return [f"recipe {self.recipe.name} by TransformerEngine, native: {self._runs}"]
