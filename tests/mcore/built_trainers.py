"""Trainers of a world of one process with random gradients, for tests of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

from megatron_lowprec.mcore.optim.fused_adamw import FusedAdamW
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.training import model, schedule
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.model import Trainer
from tests.environment import PLACE_IN_LAUNCH
from tests.training.helpers import argv

Build = Callable[..., Trainer]
KINDS: list[dict[str, Any]] = [
    {"bf16": True},
    {"bf16": True, "use_distributed_optimizer": True},
    {"bf16": True, "grad_reduce_in_bf16": True},
    {"use_distributed_optimizer": True},
    {},
    {"bf16": True, "num_experts": 2, "disable_bias_linear": True},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "fp32")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Trainers of a world of one process, as the driver makes them; gradients are random, some of them large."""
    for name in PLACE_IN_LAUNCH:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()

    def make(scale: float = 1.0, recipe: str = "bf16", **options: Any) -> Trainer:
        ranks = startup.prepare_environment()
        config, _, _ = parse(argv(**options))
        config = resolve_run(resolve_model(config), 1, gpus=False)
        if not dist.is_initialized():
            startup.initialize(config, ranks)
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        trainer = model.build(
            config,
            get_recipe(recipe),
            schedule.plan(config, config.steps.global_batch_size, config.steps.samples)[0],
            256,
        )
        generator = torch.Generator().manual_seed(3)
        for chunk in trainer.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                noise = torch.randn(buffer.grad_data.shape, generator=generator)
                buffer.grad_data.copy_(noise * scale * torch.exp2(4 * noise.roll(1)))
        return trainer

    yield make
    torch.set_num_threads(threads)
    if dist.is_initialized():
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for chunk in trainer.chunks for weight in chunk.parameters()]


def main_weights(trainer: Trainer) -> list[torch.Tensor]:
    return [getattr(weight, "main_param", weight) for chunk in trainer.chunks for weight in chunk.parameters()]


def main_grads(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.main_grad for chunk in trainer.chunks for weight in chunk.parameters()]


def fuse(trainer: Trainer) -> Trainer:
    """The update of a GPU, by the reference of its kernel."""
    for part in trainer.optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            part.fused_adamw = FusedAdamW(part)
    return trainer


def states(part: Any) -> list[dict[str, torch.Tensor]]:
    return [part.optimizer.state[main] for group in part.optimizer.param_groups for main in group["params"]]
