"""TransformerEngine's layers in the place of ours: Megatron-core's own spec, contexts and caches, nothing of ours.

Megatron-core enters TransformerEngine's FP8 contexts by itself, from ``TransformerConfig.fp8`` and its neighbours, and
marks the first microbatch of a step, after which a quantized weight is kept. What is left to do is here.
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
from megatron_lowprec.recipe.schema import Recipe

EXTRA_STATE = "_extra_state"
"""End of the state-dict keys under which its layers keep what is no weight: amax histories, as pickled bytes."""
_ALLOW_PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def check_support(fp8_recipe: str) -> None:
    """Refuse an FP8 recipe, by Megatron's name, that this GPU or CUDA does not run.

    Raises:
        UserError: with TransformerEngine's reason.
    """
    import transformer_engine.pytorch as te

    ask = te.is_fp8_block_scaling_available if fp8_recipe == "blockwise" else te.is_fp8_available
    available, reason = ask(return_reason=True)
    if not available:
        raise UserError(
            f"this recipe is TransformerEngine's {fp8_recipe} scaling, which it does not run on this machine: {reason} "
            "Use --recipe bf16 or --transformer-impl local"
        )


def te_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """TransformerEngine's layers of this pipeline stage, norms, attention and linears, for ``GPTModel``."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def accumulate_wgrad(model_chunks: Sequence[nn.Module]) -> None:
    """Let TransformerEngine's linears add weight gradients to ``main_grad`` inside the GEMM.

    Not by ``TransformerConfig.gradient_accumulation_fusion``: with it Megatron-core's own output layer asks for apex.
    """
    for chunk in model_chunks:
        module: Any
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


@contextmanager
def loading_extra_states() -> Iterator[None]:
    """Lets TransformerEngine unpickle its extra states, which it otherwise refuses.

    They are pickles inside a checkpoint's objects; ``training.checkpoint.safe_load`` must have checked them before.
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
    """``mcore.runtime.RecipeRuntime``'s counterpart: TransformerEngine follows steps and microbatches by itself.

    Args:
        recipe: what was asked for.
        runs: what TransformerEngine makes of it, for the header.
    """

    def __init__(self, recipe: Recipe, runs: str) -> None:
        self.recipe, self._runs = recipe, runs

    def begin_step(self, step: int) -> None:
        """Nothing to do."""

    def begin_microbatch(self, index: int) -> None:
        """Nothing to do: Megatron-core's schedules mark the first one."""

    def end_step(self, updated: bool = True) -> None:
        """Nothing to do: amax histories move on when the FP8 context ends, also in a step that is then skipped."""

    def rescale_gradients(self, factor: float) -> bool:
        """Nothing to do: TransformerEngine's histories follow as their windows move on."""
        return False

    def gemms(self) -> dict[str, str]:
        """GEMM -> how it runs."""
        return {
            name: f"native, TransformerEngine: {self._runs}" if gemm.quantized else "not quantized"
            for name, gemm in self.recipe.gemms.items()
        }

    def header(self) -> list[str]:
        """Lines that say how the recipe runs here."""
        return [f"recipe {self.recipe.name} by TransformerEngine, native: {self._runs}"]
