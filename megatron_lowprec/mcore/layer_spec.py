"""One layer spec for a whole GPT under a recipe, for ``GPTModel`` and Megatron-LM's ``--spec``."""

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_lowprec.mcore import patches
from megatron_lowprec.mcore.cpu_compat import bind_te_general_gemm
from megatron_lowprec.mcore.layers.norm import Norm
from megatron_lowprec.mcore.layers.transformer_layer import LowPrecTransformerLayer
from megatron_lowprec.mcore.optim.spec_optimizer import build_optimizers_of_megatron_lm
from megatron_lowprec.mcore.step_tracker import StepTracker
from megatron_lowprec.recipe.parsing import RecipeLike, as_recipe


def layer_spec(
    recipe: RecipeLike,
    seed: int | None = None,
    *,
    fp8_dispatch: bool = False,
    fp8_gather: bool = False,
    total_steps: int | None = None,
) -> ModuleSpec:
    """Spec of every layer of a ``GPTModel``: binds the recipe and follows steps and microbatches without further calls.

    Binds two names in Megatron-core that it needs without TransformerEngine and apex: ``te_general_gemm`` of its MoE
    router, and the norm behind the last layer, whose stand-in knows neither RMSNorm nor sequence parallelism.

    Args:
        recipe: a Recipe, the name of one, or a YAML file.
        seed: base of all random draws, the same on all ranks; None for Megatron-LM's ``--seed``, elsewhere 1234.
        fp8_dispatch: send tokens and gradients to experts as codes, in an all-to-all over expert-parallel ranks.
        fp8_gather: under sequence parallelism, gather inputs and output gradients as codes.
        total_steps: steps of the whole run, for phases of the recipe that begin at a fraction of it; None for
            Megatron-LM's ``--train-iters``.

    Raises:
        UserError: an unknown recipe; outside of Megatron-LM, one that also quantizes optimizer state, gradients or
            weights; a phase at a fraction of an unknown number of steps, or two at one step.
    """
    chosen = as_recipe(recipe)

    class Layer(LowPrecTransformerLayer):
        tracker = StepTracker(chosen, seed, fp8_dispatch=fp8_dispatch, fp8_gather=fp8_gather, total_steps=total_steps)

    Layer.__name__ = Layer.__qualname__ = LowPrecTransformerLayer.__name__
    bind_te_general_gemm()
    build_optimizers_of_megatron_lm()
    if transformer_block.LayerNormImpl in (WrappedTorchNorm, FusedLayerNorm):
        patches.bind("final_norm", LayerNormImpl=Norm)
    return ModuleSpec(module=Layer)
