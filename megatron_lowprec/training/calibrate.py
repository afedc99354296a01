"""Delayed scaling's histories, filled before a run continues under a recipe that its checkpoint has none for.

A fresh run's first step runs with scale 1, as TransformerEngine's does. In the middle of a training that step would be
taken with gradients that E5M2 rounds to zero at scale 1, and Adam would remember it. So the next batch is run forward
and backward a few times without an update: in the first pass each layer's input and weight are seen, and the gradients
that come by the residual stream; those that come through another quantized GEMM only once that one's scale is right.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_lowprec.mcore.optim.fp8_param_gather import finalize
from megatron_lowprec.training.checkpoint import random_state
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.data.batches import Batches
from megatron_lowprec.training.model import Trainer
from megatron_lowprec.training.step import forward_backward

PASSES = 3


def calibrate(
    trainer: Trainer, batches: Callable[[], list[Batches]], config: Config, iteration: int, device: torch.device
) -> None:
    """Fill the histories; weights, moments and random state stay as they are.

    Args:
        batches: gives the next step's batches anew.
        iteration: those completed.
    """
    before = random_state.capture()
    for _ in range(PASSES):
        forward_backward(trainer, batches(), config, iteration, device)
        trainer.runtime.end_step()
        finalize(trainer.optimizer, trainer.chunks)
        random_state.restore(before)
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
