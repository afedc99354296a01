"""Options of a model under a recipe, besides the recipe: the keyword arguments of ``bind_recipe``."""

from collections.abc import Sequence
from typing import Required, TypedDict


class RuntimeOptions(TypedDict, total=False):
    """Arguments of ``RecipeRuntime``.

    Args:
        num_layers: transformer layers over all pipeline stages.
        seed: the run's seed, the base of all random streams.
        accumulate_wgrad: accumulate weight gradients into an fp32 ``main_grad``, without rounding to the compute dtype.
        share_rng_across_dp: draw the same rounding noise on every data-parallel rank (for ablations).
        reduce_amax: reduce the amax of a current scale over all tensor-parallel ranks; if False, each rank scales its
            shard by the shard's amax. Histories of delayed scaling are always reduced.
        cache_weights: reuse quantized weights across the microbatches of a step.
        save_memory: compute inputs of quantized layers again in the backward pass instead of saving them twice, and
            cache no quantized weight beside one in the compute dtype.
        emulate: multiply in the compute dtype even where the device has FP8 GEMMs, or native ones of these backends.
        emulate_accumulator: sum emulated GEMMs that ask for fast accumulation as Hopper's tensor cores do.
        rerun_in_bf16: globs of single GEMMs to run unquantized, such as ``layers.3.mlp.linear_fc1.dgrad``.
        fp8_gather: under sequence parallelism, gather FP8 codes of inputs and output gradients where both GEMMs of a
            layer take them; other layers gather in the compute dtype.
        total_steps: steps of the whole run, for phases of the recipe that begin at a fraction of it.
        fp8_dispatch: send tokens to experts, and gradients back to them, as codes where fc1 and fc2 are quantized.
    """

    num_layers: Required[int]
    seed: Required[int]
    accumulate_wgrad: bool
    share_rng_across_dp: bool
    reduce_amax: bool
    cache_weights: bool
    save_memory: bool
    emulate: bool | frozenset[str]
    emulate_accumulator: bool
    rerun_in_bf16: Sequence[str]
    fp8_gather: bool
    fp8_dispatch: bool
    total_steps: int | None
