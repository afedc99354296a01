"""Steps with a non-finite loss or gradient: finds the first non-finite tensor and decides when to give up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowprec.mcore.debug.finite import all_finite
from megatron_lowprec.mcore.debug.finite_check import Finding, FiniteCheck
from megatron_lowprec.mcore.optim.expert_bias import keep_expert_biases
from megatron_lowprec.mcore.optim.stored_gradient import has_finite_gradient
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.recipe.parsing import recipe_from_dict
from megatron_lowprec.training.checkpoint import random_state
from megatron_lowprec.training.config.resolve import describe_layout
from megatron_lowprec.training.data.batches import Batches
from megatron_lowprec.training.distributed.interrupt import Stop
from megatron_lowprec.training.model import Trainer
from megatron_lowprec.training.options.parts import Steps
from megatron_lowprec.training.step import forward_backward

REPORT = "bad_numbers.md"


@dataclass(frozen=True)
class Diagnosis:
    """The first non-finite tensor as text, and the GEMM's name if it is of a quantized one."""

    text: str
    gemm: str = ""


def diagnose(trainer: Trainer, batches: list[Batches], iteration: int, before: dict[str, Any]) -> Diagnosis:
    """Repeat a skipped step's forward and backward and return the first non-finite tensor; a collective call.

    Args:
        batches: batches at the step's position in the data.
        iteration: iterations completed before the step.
        before: this rank's random state at the step's start, so that dropout is the same.
    """
    after, restore_biases = random_state.capture(), keep_expert_biases(trainer.chunks)
    random_state.restore(before)
    with FiniteCheck(trainer.chunks) as check:
        loss = forward_backward(trainer, batches, iteration)
    found: list[Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, check.first)
    first = min((finding for finding in found if finding is not None), default=None)
    found_here = Diagnosis(str(first), first.gemm) if first is not None else _reduced_gradients(trainer, loss.mean())
    # Undo the repetition: drop gradients, recorded amaxes and moves of balancing biases.
    restore_biases()
    trainer.runtime.end_step(updated=False)
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    random_state.restore(after)
    return found_here


def _reduced_gradients(trainer: Trainer, loss: float) -> Diagnosis:
    """If all local tensors are finite: weights whose gradient is not finite after its reduction."""
    names = sorted(
        name.removeprefix("module.")
        for chunk in trainer.chunks
        for name, weight in chunk.named_parameters()
        if not has_finite_gradient(weight)
    )
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, names)
    for rank, bad in enumerate(everyone):
        if bad:
            return Diagnosis(f"gradient of {bad[0]}, on rank {rank}, once reduced: its parts are finite")
    return Diagnosis(f"nothing, when the step was run again (loss {loss:.6g}): look at hardware and communication")


@torch.no_grad()
def weights_are_finite(trainer: Trainer) -> bool:
    """Whether all weights on all ranks are finite; if not, no checkpoint may replace a good one."""
    bad = torch.zeros((), dtype=torch.int32, device=next(trainer.chunks[0].parameters()).device)
    for chunk in trainer.chunks:
        for weight in chunk.parameters():
            # Inf saturates in FP8 codes; the amax of the main weights shows it.
            values = weight.main_amax if isinstance(weight, Fp8Weight) else weight
            bad |= ~all_finite(values)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return not bad


@dataclass
class BadSteps:
    """Counts consecutive skipped steps, those before this start included. ``diagnose`` runs for the first of them."""

    steps: Steps
    run_folder: Path
    in_a_row: int = 0
    _told: list[str] = field(default_factory=list)
    _gemm: str = ""

    def passed(self) -> None:
        """Record a finite step."""
        self.in_a_row = 0
        self._told.clear()

    def skipped(
        self, iteration: int, loss: float, grad_norm: float | None, diagnose: Callable[[], Diagnosis]
    ) -> list[str]:
        """Record the skipped step that ended as ``iteration``; returns log lines."""
        self.in_a_row += 1
        what = f"loss {loss:.6g}" + ("" if grad_norm is None else f", gradient norm {grad_norm:.6g}")
        lines = [f"iteration {iteration} skipped ({what}): weights and moments stay as they were"]
        if not self._told:
            diagnosis = diagnose()
            lines.append(f"first of it that is not finite: {diagnosis.text}")
            self._gemm = diagnosis.gemm
        self._told += lines
        return lines

    def stop(self) -> Stop | None:
        """A reason to give up, after --max-skipped-steps in a row; else None."""
        if self.in_a_row < self.steps.max_skipped_steps:
            return None
        return self._failed(f"{self.in_a_row} iterations in a row were skipped, for loss or gradient were not finite")

    def failure(self, iteration: int, finite_weights: bool) -> Stop | None:
        """Why a run that ended after ``iteration``, and was not given up, has failed all the same; else None."""
        if not finite_weights:
            return self._failed(f"after iteration {iteration} the weights are not finite")
        if self.in_a_row and iteration >= self.steps.iterations:
            last = "iteration was" if self.in_a_row == 1 else f"{self.in_a_row} iterations were"
            return self._failed(f"the last {last} skipped, for loss or gradient were not finite")
        return None

    def _failed(self, reason: str) -> Stop:
        error = f"{reason}; {self.run_folder / REPORT} says what was found"
        return Stop(reason, requeue=False, at_once=True, error=error)

    def report(self, content: dict[str, Any], iteration: int, reason: str, finite_weights: bool) -> None:
        """Write the diagnosis into the run's folder; called by one rank.

        A start that skipped nothing keeps that of an earlier one, whose skipped iterations it counts on from.
        """
        if not self._told and self.in_a_row and finite_weights and (self.run_folder / REPORT).exists():
            return
        found = "\n".join(f"- {line}" for line in self._told or ["No iteration of this start was skipped."])
        state = (
            "The checkpoint of this iteration holds weights and moments as they were before the first of these."
            if finite_weights
            else "Weights are not finite themselves: an earlier update has spoiled them, so no checkpoint was written. "
            "Continue from an older one."
        )
        layout = describe_layout(content["layout"])
        advice = "The recipe quantizes none: look at data, learning rate, and the hardware."
        if recipe_from_dict(content["recipe"]).quantized:
            advice = f"""To see whether its
quantization is at fault, continue from the checkpoint with only that GEMM unquantized:

    --rerun-in-bf16 {self._gemm or "layers.N.mlp.linear_fc1.dgrad"}

or with all of it, `--recipe bf16`. If neither helps the cause lies elsewhere: data, learning rate, or the hardware."""
        text = f"""# Stopped at iteration {iteration}: {reason}

Recipe {content["recipe"]["name"]}; {layout}; seed {content["options"]["seed"]}.

{found}

{state}

A GEMM is named by layer (counted from 1 over all pipeline stages), linear layer and pass. {advice}
"""
        self.run_folder.mkdir(parents=True, exist_ok=True)
        (self.run_folder / REPORT).write_text(text, encoding="utf-8")
