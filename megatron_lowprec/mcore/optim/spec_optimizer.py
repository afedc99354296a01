"""The optimizer of Megatron-LM's own training loop under ``--spec``: the recipe's, and updated as the driver's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_lowprec.mcore.optim.fp8_param_gather import finalize
from megatron_lowprec.mcore.optim.fused_adamw import supports_fused_adamw
from megatron_lowprec.mcore.optim.optimizer_step import copy_weights_at_once, fuse_adamw, optimizer_step
from megatron_lowprec.mcore.optim.recipe_optimizer import build_optimizer
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.mcore.placement import layers_of_model
from megatron_lowprec.mcore.step_tracker import StepTracker


def build_optimizers_of_megatron_lm() -> None:
    """Let Megatron-LM, where its training loop is loaded, build the optimizers that recipes of its models ask for."""
    training: Any = sys.modules.get("megatron.training.training")
    if training is None or hasattr(training.get_megatron_optimizer, "__wrapped__"):
        return
    for name in ("get_megatron_optimizer", "get_megatron_muon_optimizer"):  # the latter until 0.18
        if hasattr(training, name):
            bind("spec_optimizer", training, **{name: _following(getattr(training, name))})


def _following(build: Callable[..., MegatronOptimizer]) -> Callable[..., MegatronOptimizer]:
    """A builder of Megatron-LM's that follows the recipe of its models."""

    @wraps(build)
    def build_for_recipe(
        config: OptimizerConfig, model_chunks: list[DistributedDataParallel], **options: Any
    ) -> MegatronOptimizer:
        tracker = _tracker_of(model_chunks)
        if tracker is None:
            layers_of_model((), on_all_stages=True)  # a stage without layers, while the others gather theirs
        else:
            tracker.check_rules()
        if tracker is not None and tracker.recipe.changes_training:
            return _of_recipe(tracker, config, model_chunks, partial(build, **options))
        optimizer = build(config, model_chunks, **options)
        fuse_update(optimizer)
        return optimizer

    return build_for_recipe


def _tracker_of(chunks: list[DistributedDataParallel]) -> StepTracker | None:
    """Of layers of ``layer_spec``."""
    found = (getattr(module, "tracker", None) for chunk in chunks for module in chunk.modules())
    return next((tracker for tracker in found if isinstance(tracker, StepTracker)), None)


def _of_recipe(
    tracker: StepTracker, config: OptimizerConfig, chunks: list[DistributedDataParallel], build: Callable[..., Any]
) -> MegatronOptimizer:
    """The optimizer of a recipe with its own state or gradients, whose ``step`` ends the tracker's steps."""
    if tracker.recipe.fp8_weights:
        for chunk in chunks:
            chunk.ddp_config.fp8_param_gather = True  # which the optimizer reads
    optimizer, factor = build_optimizer(chunks, tracker.recipe, config, seed=tracker.seed, build=build)
    # a checkpoint may have been loaded since
    tracker.lead_by_optimizer(factor, partial(finalize, optimizer, chunks))
    bind("spec_update", optimizer, step=partial(_step, optimizer, tracker))
    return optimizer


def _step(optimizer: MegatronOptimizer, tracker: StepTracker) -> tuple[bool, float | None, int | None]:
    """Replacement of ``ChainedOptimizer.step``; amax histories follow behind the update of FP8 weights."""
    found = optimizer_step(optimizer)
    tracker.end_step(updated=found[0])
    return found


def fuse_update(optimizer: MegatronOptimizer) -> None:
    """Replace norm, clipping, AdamW and the copy of main weights by a few launches, if torch's AdamW runs on a GPU.

    An optimizer of TransformerEngine, apex or another kind stays as it is.
    """
    parts = [part for part in getattr(optimizer, "chained_optimizers", []) if not part.is_stub_optimizer]
    if not parts or not all(supports_fused_adamw(part) for part in parts):
        return
    fuse_adamw(optimizer)
    copy_weights_at_once(optimizer)
    bind("spec_update", optimizer, step=partial(optimizer_step, optimizer))
