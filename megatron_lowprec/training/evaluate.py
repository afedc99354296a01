"""Loss and perplexity of a split, without touching the recipe's training state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu

from megatron_lowprec.training.config import Config
from megatron_lowprec.training.data import Batches, SplitData
from megatron_lowprec.training.model import Trainer, gathered
from megatron_lowprec.training.shapes import sized
from megatron_lowprec.training.step import run_microbatches


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats a token."""

    loss: float

    @property
    def perplexity(self) -> float:
        # Megatron's bound: e^20 already says that nothing was learned.
        return math.exp(min(20.0, self.loss))


def evaluate(trainer: Trainer, split: SplitData, config: Config, device: torch.device) -> Evaluation:
    """Over --eval-iters global batches, always the same ones; every rank calls it and gets the result."""
    batches = [Batches(split, 0, config, device) for _ in trainer.chunks]
    per_iteration = sized(config.global_batch_size) // (
        sized(config.micro_batch_size) * mpu.get_data_parallel_world_size()
    )
    with _evaluating(trainer, config), torch.no_grad():
        # One call an iteration bounds the activations that a pipeline keeps.
        losses = [run_microbatches(trainer, batches, per_iteration, config, device) for _ in range(config.eval_iters)]
    return Evaluation(sum(loss.mean() for loss in losses) / len(losses))


@contextmanager
def _evaluating(trainer: Trainer, config: Config) -> Iterator[None]:
    with gathered(trainer, config):
        for chunk in trainer.chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in trainer.chunks:
                chunk.train()
