"""Fills amax histories of delayed scaling before a run continues under a recipe that its checkpoint has none for.

A fresh run's first step uses scale 1, as in TransformerEngine. In the middle of a training E5M2 at scale 1 would round
that step's gradients to zero, and Adam's moments would keep the effect. So the next batch runs forward and backward a
few times without an update. The first pass records each layer's input and weight, and gradients from the residual
stream. Gradients through another quantized GEMM are recorded once that GEMM's scale is right.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_lowprec.mcore.optim.expert_bias import keep_expert_biases
from megatron_lowprec.mcore.optim.fp8_param_gather import finalize
from megatron_lowprec.training.checkpoint import random_state
from megatron_lowprec.training.data.batches import Batches
from megatron_lowprec.training.model import Trainer
from megatron_lowprec.training.step import forward_backward

PASSES = 3


def calibrate(trainer: Trainer, batches: Callable[[], list[Batches]], iteration: int) -> None:
    """Fill the amax histories; weights, moments, balancing biases and random state are unchanged.

    Args:
        batches: returns new iterators over the next step's batches.
        iteration: completed iterations.
    """
    before, restore_biases = random_state.capture(), keep_expert_biases(trainer.chunks)
    for _ in range(PASSES):
        forward_backward(trainer, batches(), iteration)
        trainer.runtime.end_step()
        finalize(trainer.optimizer, trainer.chunks)
        random_state.restore(before)
        restore_biases()
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
