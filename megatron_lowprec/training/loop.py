"""The training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)

from megatron_lowprec.linear.capture_file import Capture
from megatron_lowprec.recipe.explain import phase_in_force
from megatron_lowprec.recipe.layer_match import Progress
from megatron_lowprec.training.calibrate import PASSES, calibrate
from megatron_lowprec.training.checkpoint import random_state
from megatron_lowprec.training.checkpoint.checkpoint import RunProgress
from megatron_lowprec.training.checkpoint.writer import CheckpointWriter
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.paths import RunPaths
from megatron_lowprec.training.data.batches import Batches, Data
from megatron_lowprec.training.distributed.interrupt import Stop, StopReasons, ask_requeue
from megatron_lowprec.training.distributed.rank_sync import on_any_rank, run_on_all_ranks
from megatron_lowprec.training.evaluation.validation import evaluate
from megatron_lowprec.training.manual_gc import ManualGc
from megatron_lowprec.training.model import Trainer, gathered
from megatron_lowprec.training.models.sizes import flops_per_sample
from megatron_lowprec.training.monitoring.bad_numbers import BadSteps, Diagnosis, diagnose, weights_are_finite
from megatron_lowprec.training.monitoring.log import RunLog, StepRow
from megatron_lowprec.training.monitoring.native_check import NativeCheck
from megatron_lowprec.training.monitoring.operand_files import write_captures
from megatron_lowprec.training.monitoring.profiler import Profiler
from megatron_lowprec.training.monitoring.run_metadata import RunRecord
from megatron_lowprec.training.step import train_step


@dataclass
class Run:
    """Components of a run after setup."""

    config: Config
    paths: RunPaths
    device: torch.device
    trainer: Trainer
    data: Data
    progress: RunProgress
    log: RunLog
    stops: StopReasons
    checkpoints: CheckpointWriter
    record: RunRecord
    # Content of config.yaml besides the progress.
    saved: dict[str, Any]
    # Amax histories of delayed scaling are missing that training would have by now.
    uncalibrated: bool

    def __post_init__(self) -> None:
        self.garbage = ManualGc(self.config)


def train(run: Run) -> Stop | None:
    """Iterate to --train-iters or to a reason to stop, which is returned; evaluate, log and save in between.

    The reason is an error as well if the run ends with weights that are not finite, or with skipped iterations.
    """
    config, progress = run.config, run.progress
    train_iters = config.steps.iterations
    if progress.iteration >= train_iters:
        run.log.say(
            f"nothing to train: the checkpoint is at iteration {progress.iteration} of --train-iters {train_iters}"
        )
    bad_steps = BadSteps(config.steps, run.paths.run, progress.skipped_in_a_row)
    profiler = Profiler(config, run.paths.run, progress.iteration, run.log.say)
    with run.garbage, profiler:
        stop, finite = _iterate(run, profiler, bad_steps)
        run.checkpoints.finish()
        if stop is not None and stop.requeue and progress.iteration >= train_iters:
            stop = None  # only evaluations may be left, which ask again
        if stop is None or stop.error is None:
            stop = bad_steps.failure(progress.iteration, finite) or stop
        if stop is None and config.eval_iters:
            stop = _evaluate(run, "valid") or _evaluate(run, "test")
    if stop is not None and stop.error is not None and dist.get_rank() == 0:
        bad_steps.report(run.saved, progress.iteration, stop.reason, finite)
    if stop is not None:
        run.log.say(f"stopping at iteration {progress.iteration}: {stop.reason}")
        if dist.get_rank() == 0 and stop.requeue:
            # The checkpoint to resume from is on disk by now.
            ask_requeue(config.save, progress.iteration, stop.reason)
    return stop


def _iterate(run: Run, profiler: Profiler, bad_steps: BadSteps) -> tuple[Stop | None, bool]:
    """All iterations of this start, with a checkpoint of the last one; returns why they ended early, and whether the
    weights are finite.
    """
    config, progress = run.config, run.progress
    train_iters = config.steps.iterations
    batches = _train_batches(run) if progress.iteration < train_iters else []
    saved_at, finite = progress.iteration, True
    check = NativeCheck(config, run.device, run.log.say, run.record.native_check)
    update_num_microbatches(progress.consumed_samples)
    if run.uncalibrated and batches:
        run.log.say(*run.trainer.enter_phase(progress.iteration))
        _calibrate(run)
    # Make up for an evaluation in which the previous run was interrupted.
    stop = run.stops.interrupted() or _evaluate_if_due(run)
    while progress.iteration < train_iters and stop is None:
        _enter_phase(run)
        profiler.before(progress.iteration)
        row = _train_iteration(run, batches, bad_steps)
        profiler.after(progress.iteration)
        check.after_iteration()
        run.log.step(row)
        run.garbage.after(progress.iteration)
        run.checkpoints.poll()
        stop = bad_steps.stop() or run.stops.after(progress.iteration)
        if stop is None or not stop.at_once:
            stop = _evaluate_if_due(run) or stop
        if config.save_interval is not None and progress.iteration % config.save_interval == 0:
            saved_at, finite = progress.iteration, _save(run)
    if saved_at != progress.iteration:
        finite = _save(run)
    return stop, finite


def _enter_phase(run: Run) -> None:
    """Enter the recipe's phase of the next iteration, as a run enters it that resumes under the phase's recipe."""
    runtime, now = run.trainer.runtime, Progress(run.progress.iteration, run.config.train_iters)
    changed = run.trainer.enter_phase(now.step)
    if changed:
        run.log.say(*changed)
        run.record.enter_phase(phase_in_force(runtime.recipe, now), runtime.gemms())
        if on_any_rank(run.trainer.fit_histories(), run.device):
            _calibrate(run)


def _calibrate(run: Run) -> None:
    calibrate(run.trainer, lambda: _train_batches(run), run.progress.iteration)
    run.log.say(f"delayed scaling: histories filled by {PASSES} passes over the next batch, without an update")


def _train_batches(run: Run) -> list[Batches]:
    split = run.data["train"]
    assert split is not None, "resolve() asks for training data"
    return [Batches(split, run.progress.consumed_samples, run.config, run.device) for _ in run.trainer.chunks]


def _train_iteration(run: Run, batches: list[Batches], bad_steps: BadSteps) -> StepRow:
    """One step, its bookkeeping and its log row."""
    progress, config = run.progress, run.config
    before = random_state.capture()
    batch_size = get_current_global_batch_size()
    started = time.perf_counter()
    result = train_step(run.trainer, batches, config, progress.iteration)
    if result.updated:
        run.trainer.scheduler.step(increment=batch_size)
        bad_steps.passed()
    else:
        progress.skipped_iterations += 1

        def diagnosis() -> Diagnosis:
            return diagnose(run.trainer, _train_batches(run), progress.iteration, before)

        run.log.say(*bad_steps.skipped(progress.iteration + 1, result.loss, result.grad_norm, diagnosis))
    progress.iteration += 1
    progress.consumed_samples += batch_size
    progress.skipped_in_a_row = bad_steps.in_a_row
    _enter_batch_size(run)
    if result.operands is not None:
        run.log.quantization(progress.iteration, result.operands)
    if result.captures is not None:
        _write_captures(run, result.captures)
    if math.isnan(result.loss):
        progress.nan_iterations += 1
    seconds = time.perf_counter() - started
    flops = batch_size * flops_per_sample(config, run.saved["padded_vocab_size"])
    return StepRow(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        loss=result.loss,
        learning_rate=run.trainer.optimizer.param_groups[0]["lr"],
        batch_size=batch_size,
        seconds=seconds,
        tflops_per_gpu=flops / seconds / 1e12 / dist.get_world_size(),
        grad_norm=result.grad_norm,
        num_zeros=result.num_zeros,
        params_norm=result.params_norm,
        skipped_iterations=progress.skipped_iterations,
        nan_iterations=progress.nan_iterations,
        state=result.state,
    )


def _write_captures(run: Run, captures: list[Capture]) -> None:
    folder = run.paths.captures / f"iteration_{run.progress.iteration}"
    run_on_all_ranks(lambda: write_captures(folder, captures))
    run.log.say(f"operands of iteration {run.progress.iteration} written to {folder}")


def _enter_batch_size(run: Run) -> None:
    """Switch to the next iteration's batch size; this iteration's checkpoint holds amax histories for it."""
    before = get_num_microbatches()
    update_num_microbatches(run.progress.consumed_samples)
    if not run.config.calculate_per_token_loss:
        # Megatron-core divides the loss by the number of microbatches.
        run.trainer.runtime.rescale_gradients(before / get_num_microbatches())


def _evaluate_if_due(run: Run) -> Stop | None:
    """Validate every --eval-interval iterations, unless done; the last iteration's validation follows the training."""
    config, progress = run.config, run.progress
    due = config.eval_iters and progress.iteration and progress.iteration % config.eval_interval == 0
    if not due or progress.iteration in (progress.evaluated, config.train_iters):
        return None
    stop = _evaluate(run, "valid")
    if stop is None:
        progress.evaluated = progress.iteration
    return stop


def _evaluate(run: Run, split: str) -> Stop | None:
    """Evaluate and log; if a reason to stop comes up meanwhile, return it and log nothing."""
    data = run.data[split]
    if data is None:
        return None
    stop: Stop | None = None

    def interrupted() -> bool:
        nonlocal stop
        stop = run.stops.interrupted()
        return stop is not None

    with run.garbage.evaluation():
        result = evaluate(run.trainer, data, run.config, run.device, interrupted)
    if result is not None:
        run.log.evaluation(run.progress.iteration, run.progress.consumed_samples, split, result.loss, result.perplexity)
    return stop


def _save(run: Run) -> bool:
    """Write a checkpoint if --save is given; returns whether the weights are finite, without which none is written."""
    with gathered(run.trainer):
        finite = weights_are_finite(run.trainer)
        if finite and run.config.save is not None:
            run.checkpoints.save(run.trainer, run.progress)
    if not finite and run.config.save is not None:
        run.log.say(f"no checkpoint of iteration {run.progress.iteration}: weights are not finite")
    return finite
