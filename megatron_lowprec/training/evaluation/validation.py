"""Loss and perplexity of a split, without changing the recipe's training state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.data.batches import Batches, SplitData
from megatron_lowprec.training.model import Trainer, gathered
from megatron_lowprec.training.step import PendingLoss, run_microbatches


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats a token."""

    loss: float

    @property
    def perplexity(self) -> float:
        # Megatron's bound: e^20 already means that the model has learned nothing. ``min`` keeps a NaN that is first.
        return math.exp(min(self.loss, 20.0))


def evaluate(
    trainer: Trainer,
    split: SplitData,
    config: Config,
    device: torch.device,
    interrupted: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate --eval-iters global batches, always the same ones; a collective call that returns on every rank.

    ``interrupted`` is called on all ranks before each batch; the result is None if it returns True.
    """
    batches = [Batches(split, 0, config, device) for _ in trainer.chunks]
    per_iteration = config.steps.global_batch_size // (
        config.steps.micro_batch_size * mpu.get_data_parallel_world_size()
    )
    losses: list[PendingLoss] = []
    with _evaluating(trainer), torch.no_grad():
        # One call per iteration bounds the activations that a pipeline holds.
        for _ in range(config.eval_iters):
            if interrupted():
                return None
            losses.append(run_microbatches(trainer, batches, per_iteration))
    nats, tokens = (sum(column) for column in zip(*(loss.sums() for loss in losses), strict=True))
    return Evaluation(nats / tokens if tokens else math.nan)


@contextmanager
def _evaluating(trainer: Trainer) -> Iterator[None]:
    with gathered(trainer):
        for chunk in trainer.chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in trainer.chunks:
                chunk.train()
