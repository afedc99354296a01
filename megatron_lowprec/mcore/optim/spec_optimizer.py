"""The update of Megatron-LM's own training loop under ``--spec``, by the launches of this project's driver."""

from __future__ import annotations

import sys
from functools import partial, wraps
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_lowprec.mcore.optim.fused_adamw import supports_fused_adamw
from megatron_lowprec.mcore.optim.optimizer_step import copy_weights_at_once, fuse_adamw, optimizer_step
from megatron_lowprec.mcore.patches import bind


def fuse_updates_in_megatron_lm() -> None:
    """Let Megatron-LM, where its training loop is loaded, build optimizers whose update is fused."""
    training: Any = sys.modules.get("megatron.training.training")
    if training is None or hasattr(training.get_megatron_optimizer, "__wrapped__"):
        return
    build = training.get_megatron_optimizer

    @wraps(build)
    def get_megatron_optimizer(*args: Any, **options: Any) -> MegatronOptimizer:
        optimizer: MegatronOptimizer = build(*args, **options)
        fuse_update(optimizer)
        return optimizer

    bind("spec_optimizer", training, get_megatron_optimizer=get_megatron_optimizer)


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
