"""One training step: forward and backward passes of all microbatches, then the update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lowprec.linear.capture_file import Capture
from megatron_lowprec.mcore.debug.operand_capture import OperandCapture
from megatron_lowprec.mcore.debug.operand_probe import OperandId, OperandProbe
from megatron_lowprec.mcore.layers.router import LossTokens
from megatron_lowprec.mcore.optim.expert_bias import keep_expert_biases
from megatron_lowprec.mcore.optim.optimizer_step import optimizer_step
from megatron_lowprec.mcore.optim.state_stats import state_stats
from megatron_lowprec.mcore.pending_numbers import PendingNumbers
from megatron_lowprec.quantization.error_stats import QuantizationError
from megatron_lowprec.recipe.layer_match import Progress
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.phase_options import with_steps
from megatron_lowprec.training.data.batches import Batches
from megatron_lowprec.training.model import Runtime, Trainer, gathered
from megatron_lowprec.training.monitoring.counterfactuals import counterfactual_recipes

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class StepResult:
    """Result of one training step for the log: the same on every rank.

    ``operands`` and ``state`` are measured every --log-quantization-interval iterations. ``captures`` are this rank's,
    in the iterations of --capture-step.
    """

    loss: float
    updated: bool
    grad_norm: float | None
    num_zeros: int | None
    params_norm: float | None
    operands: list[tuple[OperandId, QuantizationError]] | None = None
    state: dict[str, float] = field(default_factory=dict)
    captures: list[Capture] | None = None


def train_step(trainer: Trainer, batches: list[Batches], config: Config, iteration: int) -> StepResult:
    """Run one iteration over the current global batch; ``iteration`` counts those completed before.

    If the loss or the gradient norm is not finite, weights, moments, balancing biases, amax histories and the gradient
    factor are unchanged.
    """
    interval = config.log_quantization_interval
    probe = None
    if interval is not None and (iteration + 1) % interval == 0:
        now = Progress(iteration, config.train_iters)
        others = [with_steps(each, config).during(now) for each in counterfactual_recipes(config)]
        probe = OperandProbe(trainer.chunks, config.seed, others)
    captures = iteration + 1 in config.capture_step
    capture = OperandCapture(trainer.chunks, config.capture_layers, config.seed) if captures else None
    restore_biases = keep_expert_biases(trainer.chunks) if trainer.config.moe_router_enable_expert_bias else None
    with ExitStack() as stack:
        for inspection in (probe, capture):
            if inspection is not None:
                stack.enter_context(inspection)
        if probe is None and capture is None and trainer.graphs is not None:
            stack.enter_context(trainer.graphs.step())
        loss = forward_backward(trainer, batches, iteration)
    for chunk_batches in batches:
        # All work so far is only launched: the next step's first batch is ready before the device is.
        chunk_batches.prefetch()
    updated, grad_norm, num_zeros = optimizer_step(trainer.optimizer, loss.on_device())
    trainer.runtime.end_step(updated)
    if restore_biases is not None and not updated:
        restore_biases()
    if updated and trainer.gradient_factor is not None:
        trainer.gradient_factor.end_step()
    norm = None
    if config.log_params_norm:
        with gathered(trainer):
            norm = params_norm(trainer)
    result = StepResult(loss.mean(), updated, grad_norm, num_zeros, norm)
    if capture is not None:
        result = replace(result, captures=capture.found())
    if probe is None:
        return result
    state = state_stats(trainer.optimizer, trainer.gradient_factor)
    return replace(result, operands=probe.found(), state=state)


def forward_backward(trainer: Trainer, batches: list[Batches], iteration: int) -> PendingLoss:
    """Launch the gradient computation of one global batch, from zero gradients; returns its loss."""
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    if trainer.gradient_factor is not None:
        trainer.gradient_factor.forget()
    trainer.runtime.begin_step(iteration)
    return run_microbatches(trainer, batches, get_num_microbatches(), trainer.runtime)


def run_microbatches(
    trainer: Trainer, batches: list[Batches], count: int, runtime: Runtime | None = None
) -> PendingLoss:
    """Launch ``count`` microbatches, with backward if ``runtime`` is set; returns the loss over data-parallel ranks."""
    several = len(trainer.chunks) > 1
    outputs = get_forward_backward_func()(
        forward_step_func=ForwardStep(runtime, trainer.loss_tokens),
        data_iterator=batches if several else batches[0],
        model=trainer.chunks if several else trainer.chunks[0],
        num_microbatches=count,
        seq_length=batches[0].seq_length,
        micro_batch_size=batches[0].micro_batch_size,
        forward_only=runtime is None,
    )
    total = torch.zeros(2, dtype=torch.float64, device=batches[0].device)
    if mpu.is_pipeline_last_stage():
        total = torch.stack([output["lm loss"] for output in outputs]).sum(0)
        dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(total, mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group())
    return PendingLoss(total)


class PendingLoss:
    """A loss being copied from the device.

    Args:
        total: float64 [2], (sum over tokens, tokens).
    """

    def __init__(self, total: torch.Tensor) -> None:
        self._total, self._numbers = total, PendingNumbers(total)

    def on_device(self) -> torch.Tensor:
        """Nats a token, float64 scalar; NaN without tokens."""
        return self._total[0] / self._total[1]

    def sums(self) -> tuple[float, float]:
        """(nats, tokens)"""
        nats, tokens = self._numbers.wait()
        return nats, tokens

    def mean(self) -> float:
        """Nats a token; NaN without tokens."""
        nats, tokens = self.sums()
        return nats / tokens if tokens else float("nan")


class ForwardStep:
    """Megatron-core's forward_step_func; numbers the microbatches of each chunk for the recipe's random streams.

    Args:
        runtime: None in evaluation.
        loss_tokens: of the routers that weigh their losses by it.
    """

    def __init__(self, runtime: Runtime | None, loss_tokens: LossTokens | None = None) -> None:
        self._runtime, self._loss_tokens = runtime, loss_tokens
        self._next: dict[int, int] = {}

    def __call__(self, batches: Batches, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
        if self._runtime is not None:
            index = self._next.get(id(model), 0)
            self._next[id(model)] = index + 1
            self._runtime.begin_microbatch(index)
        batch = next(batches)
        mask = batch["loss_mask"]
        if self._runtime is not None and self._loss_tokens is not None:
            assert mask is not None
            self._loss_tokens.begin_microbatch(mask)
        attention_mask = batch["attention_mask"]
        output = model(batch["tokens"], batch["position_ids"], attention_mask, labels=batch["labels"])
        # Middle stages of a pipeline have no data; their loss is never read.
        return output, partial(_masked_loss, mask if mask is not None else torch.empty(0))


def _masked_loss(mask: torch.Tensor, losses: torch.Tensor) -> Loss:
    """(differentiable sum, tokens, [sum, tokens] for the log) of one microbatch's per-token losses."""
    mask = mask.view(-1)
    total = (losses.float().view(-1) * mask).sum()
    tokens = mask.sum()
    return total, tokens.to(torch.int), {"lm loss": torch.stack([total.detach(), tokens]).double()}


@torch.no_grad()
def params_norm(trainer: Trainer) -> float:
    """L2 norm of all weights of the model, each counted once."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    squares: dict[bool, Any] = {True: 0.0, False: 0.0}
    for chunk in trainer.chunks:
        for weight in chunk.parameters():
            if param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight):
                squares[getattr(weight, "allreduce", True)] += weight.float().square().sum()
    device = next(trainer.chunks[0].parameters()).device
    dense, expert = (torch.as_tensor(squares[kind], device=device, dtype=torch.float64) for kind in (True, False))
    dist.all_reduce(dense, group=mpu.get_model_parallel_group())
    if trainer.config.num_moe_experts:
        dist.all_reduce(expert, group=mpu.get_expert_tensor_model_pipeline_parallel_group())
    return float((dense + expert).sqrt())
