"""The training loop."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, update_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron_lowprec.training import checkpoint
from megatron_lowprec.training.checkpoint import Progress
from megatron_lowprec.training.config import Config
from megatron_lowprec.training.data import Batches, Data
from megatron_lowprec.training.evaluate import evaluate
from megatron_lowprec.training.log import RunLog, StepRow
from megatron_lowprec.training.model import Trainer, gathered
from megatron_lowprec.training.paths import RunPaths
from megatron_lowprec.training.shapes import flops_per_sample, sized
from megatron_lowprec.training.step import train_step


@dataclass
class Run:
    """All that a run consists of once it is set up."""

    config: Config
    paths: RunPaths
    device: torch.device
    trainer: Trainer
    data: Data
    progress: Progress
    log: RunLog
    # What config.yaml says beside the progress.
    saved: dict[str, Any]


def train(run: Run) -> None:
    """Iterate to --train-iters or to a reason to stop; evaluate, log and save on the way and at the end."""
    config, progress = run.config, run.progress
    train_iters = sized(config.train_iters)
    if progress.iteration >= train_iters:
        run.log.say(
            f"nothing to train: the checkpoint is at iteration {progress.iteration} of --train-iters {train_iters}"
        )
    stop, profiler = StopReasons(config, run.device), Profiler(config, run.paths)
    batches = _train_batches(run) if progress.iteration < train_iters else []
    saved_at = progress.iteration if config.load is not None else -1
    reason = None
    while progress.iteration < train_iters and reason is None:
        update_num_microbatches(progress.consumed_samples)
        profiler.before(progress.iteration)
        row = _train_iteration(run, batches)
        profiler.after(progress.iteration)
        run.log.step(row)
        reason = stop.asked(progress.iteration)
        if config.eval_iters and progress.iteration % config.eval_interval == 0 and progress.iteration < train_iters:
            _evaluate(run, "valid")
        if config.save_interval is not None and progress.iteration % config.save_interval == 0:
            saved_at = _save(run)
    if reason is not None:
        run.log.say(f"stopping at iteration {progress.iteration}: {reason}")
    if saved_at != progress.iteration:
        _save(run)
    if config.eval_iters and reason is None:
        _evaluate(run, "valid")
        _evaluate(run, "test")


def _train_batches(run: Run) -> list[Batches]:
    split = run.data["train"]
    assert split is not None, "resolve() asks for training data"
    return [Batches(split, run.progress.consumed_samples, run.config, run.device) for _ in run.trainer.chunks]


def _train_iteration(run: Run, batches: list[Batches]) -> StepRow:
    """One step, its bookkeeping and its row for the log."""
    progress, config = run.progress, run.config
    batch_size = get_current_global_batch_size()
    started = time.perf_counter()
    result = train_step(run.trainer, batches, config, progress.iteration, run.device)
    progress.iteration += 1
    progress.consumed_samples += batch_size
    if result.updated:
        run.trainer.scheduler.step(increment=batch_size)
    else:
        progress.skipped_iterations += 1
        run.log.say(
            f"iteration {progress.iteration}: the gradient is not finite "
            f"(norm {result.grad_norm}, loss {result.loss}), so "
            "weights and moments stay as they were"
        )
    if math.isnan(result.loss):
        progress.nan_iterations += 1
    seconds = time.perf_counter() - started
    flops = batch_size * flops_per_sample(config, run.saved["padded_vocab_size"])
    return StepRow(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        loss=result.loss,
        learning_rate=get_canonical_lr_for_logging(run.trainer.optimizer.param_groups) or 0.0,
        batch_size=batch_size,
        seconds=seconds,
        tflops_per_gpu=flops / seconds / 1e12 / dist.get_world_size(),
        grad_norm=result.grad_norm,
        num_zeros=result.num_zeros,
        params_norm=result.params_norm,
        skipped_iterations=progress.skipped_iterations,
        nan_iterations=progress.nan_iterations,
    )


def _evaluate(run: Run, split: str) -> None:
    data = run.data[split]
    if data is None:
        return
    result = evaluate(run.trainer, data, run.config, run.device)
    run.log.evaluation(run.progress.iteration, run.progress.consumed_samples, split, result.loss, result.perplexity)


def _save(run: Run) -> int:
    """Write a checkpoint, unless there is nowhere to; the iteration that is safe now."""
    if run.config.save is not None:
        with gathered(run.trainer, run.config):
            folder = checkpoint.save(run.config.save, run.trainer, run.progress, run.saved)
        run.log.say(f"saved {folder}")
    return run.progress.iteration


class StopReasons:
    """Why a run may end before its last iteration; all ranks agree."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._device = config, device
        self._started = time.monotonic()
        self._signalled = False
        if config.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def asked(self, iteration: int) -> str | None:
        """A reason to stop after this iteration, or None."""
        config = self._config
        if config.exit_interval is not None and iteration % config.exit_interval == 0:
            return f"--exit-interval {config.exit_interval}"
        if not config.exit_signal_handler and config.exit_duration_in_mins is None:
            return None
        minutes = (time.monotonic() - self._started) / 60
        late = config.exit_duration_in_mins is not None and minutes > config.exit_duration_in_mins
        # Clocks and signals differ between ranks.
        flags = torch.tensor([self._signalled, late], dtype=torch.int32, device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        signalled, late = map(bool, flags.tolist())
        return "SIGTERM" if signalled else f"--exit-duration-in-mins {config.exit_duration_in_mins}" if late else None


class Profiler:
    """torch's profiler from --profile-step-start to --profile-step-end; a Chrome trace a rank in the run's folder."""

    def __init__(self, config: Config, paths: RunPaths) -> None:
        self._config, self._folder = config, paths.run / "profile"
        self._profile: torch.profiler.profile | None = None

    def before(self, iteration: int) -> None:
        if self._config.profile and iteration == self._config.profile_step_start:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def after(self, iteration: int) -> None:
        if self._profile is None or iteration < min(self._config.profile_step_end, sized(self._config.train_iters)):
            return
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / f"rank{dist.get_rank()}.json"))
        self._profile = None
