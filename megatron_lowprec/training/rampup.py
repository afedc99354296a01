"""Samples of single iterations and of a whole run, with --rampup-batch-size or a constant batch size. No megatron."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.arguments import flag
from megatron_lowprec.training.config.fields import check_divisible
from megatron_lowprec.training.options.optimizer_options import OptimizerOptions
from megatron_lowprec.training.options.parts import Steps


def check_rampup(steps: Steps, schedule: OptimizerOptions, step: int) -> None:
    """Check that a ramp fits the batch size and the run.

    Args:
        schedule: options with lengths of the schedule.
        step: samples of one microbatch on every data-parallel rank.

    Raises:
        UserError: not START INCREMENT SAMPLES; sizes that do not divide; a length in iterations, which Megatron-LM
            refuses as well.
    """
    ramp = steps.rampup_batch_size
    if ramp is None:
        return
    if len(ramp) != 3 or min(ramp) < 1:
        raise UserError(f"--rampup-batch-size wants START INCREMENT SAMPLES, found {' '.join(map(str, ramp))}")
    start, increment, _ = ramp
    batch = steps.global_batch_size
    check_divisible("--rampup-batch-size's START", start, "micro-batch x data-parallel size", step)
    check_divisible("--rampup-batch-size's INCREMENT", increment, "micro-batch x data-parallel size", step)
    if batch <= start:
        raise UserError(f"--rampup-batch-size starts at {start}, not below --global-batch-size {batch}")
    check_divisible("--global-batch-size less START", batch - start, "INCREMENT", increment)
    lengths = {
        "train_iters": steps.train_iters,
        "lr_decay_iters": schedule.lr_decay_iters,
        "lr_warmup_iters": schedule.lr_warmup_iters,
    }
    for name, count in lengths.items():
        if count:
            by_samples = name.replace("_iters", "_samples")
            raise UserError(
                f"--rampup-batch-size with {flag(name)} {count}: iterations of a ramp differ in size; give "
                f"{flag(by_samples)} instead, {samples_of(steps, count)} for {count} iterations"
            )


def batch_size_at(ramp: Sequence[int] | None, batch: int, consumed: int) -> int:
    """Samples of the iteration that begins after ``consumed`` samples, by Megatron-core's rule.

    Args:
        ramp: START, INCREMENT, SAMPLES of --rampup-batch-size.
        batch: --global-batch-size.
    """
    if ramp is None or consumed > ramp[2]:
        return batch
    start, increment, samples = ramp
    per_increment = samples / ((batch - start) // increment)
    return start + int(consumed / per_increment) * increment


def ramp_sizes(ramp: Sequence[int] | None, batch: int) -> dict[int, int]:
    """Sizes of iterations by the least number of consumed samples from which on each is in effect, in their order.

    ``batch_size_at`` as a table: an iteration that begins after ``n`` samples has the size of the greatest key up to n.
    """
    if ramp is None:
        return {0: batch}
    start, increment, samples = ramp
    steps, sizes = (batch - start) // increment, {0: start}
    for step in range(1, steps + 1):
        # The rule divides in floats: the change is within a sample of the exact quotient.
        begin = max(0, step * samples // steps - 1)
        while batch_size_at(ramp, batch, begin) < start + step * increment:
            begin += 1
        sizes[begin] = batch_size_at(ramp, batch, begin)
    return sizes


def samples_of(steps: Steps, iterations: int) -> int:
    """Samples of the first ``iterations`` iterations."""
    ends = _ramp_ends(steps)[:iterations]
    return max(ends, default=0) + (iterations - len(ends)) * steps.global_batch_size


def nearest_end(steps: Steps, samples: float) -> int:
    """The end of an iteration nearest to a number of samples, in samples; 0 counts as an end."""
    ends, batch = [0, *_ramp_ends(steps)], steps.global_batch_size
    if samples < ends[-1]:
        return min(ends, key=lambda end: abs(end - samples))
    return ends[-1] + round((samples - ends[-1]) / batch) * batch


def run_length(steps: Steps, done: int = 0, consumed: int = 0) -> tuple[int, int]:
    """Iterations of the whole run and their samples; --train-samples is rounded to whole iterations.

    Args:
        done, consumed: completed iterations of a resumed run and their samples, whatever their batch size was.

    Raises:
        UserError: less than one iteration.
    """
    batch = steps.global_batch_size
    if steps.train_samples is None:
        iterations = steps.iterations
        return iterations, consumed + max(0, iterations - done) * batch
    for end in _ramp_ends(steps, consumed):
        if end <= steps.train_samples:
            done, consumed = done + 1, end
    whole = max(0, steps.train_samples - consumed) // batch
    if done + whole < 1:
        raise UserError(f"--train-samples {steps.train_samples} is less than one global batch of {batch}")
    return done + whole, consumed + whole * batch


def _ramp_ends(steps: Steps, consumed: int = 0) -> list[int]:
    """Samples consumed after each iteration of the ramp, from ``consumed`` on; empty without a ramp."""
    ramp, ends = steps.rampup_batch_size, list[int]()
    while ramp is not None and consumed <= ramp[2]:
        consumed += batch_size_at(ramp, steps.global_batch_size, consumed)
        ends.append(consumed)
    return ends
