"""Output of a run, from one rank: Megatron's log line, metrics.jsonl, TensorBoard, W&B, a terminal progress bar."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import atomic_write, json_lines
from megatron_lowprec.mcore.debug.operand_probe import OperandId
from megatron_lowprec.quantization.error_stats import QuantizationError
from megatron_lowprec.training.config.paths import RunPaths
from megatron_lowprec.training.monitoring.metrics_file import check_iteration
from megatron_lowprec.training.monitoring.quantization_log import (
    CRITICAL_RATIO,
    gradient_to_noise,
    quantization_lines,
    quantization_row,
    quantization_scalars,
)
from megatron_lowprec.training.options.output_options import LoggingOptions


@dataclass(frozen=True)
class StepRow:
    """One iteration's values; times in seconds, losses in nats a token; ``state`` as of ``state_stats``."""

    iteration: int
    consumed_samples: int
    loss: float
    learning_rate: float
    batch_size: int
    seconds: float
    tflops_per_gpu: float
    grad_norm: float | None
    num_zeros: int | None
    params_norm: float | None
    skipped_iterations: int
    nan_iterations: int
    state: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Values by Megatron's keys, without those not measured.

        Times are rounded, to 0.01 ms and ``rate``: digits below are noise that archives of runs would keep.
        """
        values = {
            "lm loss": self.loss,
            "learning-rate": self.learning_rate,
            "batch-size": self.batch_size,
            "grad-norm": self.grad_norm,
            "num-zeros": self.num_zeros,
            "params-norm": self.params_norm,
            "iteration-time": round(self.seconds, 5),
            "throughput": float(rate(self.tflops_per_gpu)),
            "skipped iterations": self.skipped_iterations,
            "nan iterations": self.nan_iterations,
            **self.state,
        }
        return {key: value for key, value in values.items() if value is not None}


def rate(tflops: float) -> str:
    """To 0.1 TFLOP/s as Megatron's log has it; below 1, a CPU's, in two digits."""
    return f"{tflops:.1f}" if tflops >= 1 else f"{tflops:.2g}"


def iteration_line(row: StepRow, train_iters: int, loss: float, seconds: float, tflops: float) -> str:
    """Megatron's log line in its order; ``loss``, ``seconds`` and ``tflops`` are means over the log interval."""
    parts = [
        f"iteration {row.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {row.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {seconds * 1000.0:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {rate(tflops)}",
        f"learning rate: {row.learning_rate:.6E}",
        f"global batch size: {row.batch_size:5d}",
        f"lm loss: {loss:.6E}",
        "loss scale: 1.0",
    ]
    if row.grad_norm is not None:
        parts.append(f"grad norm: {row.grad_norm:.3f}")
    if row.num_zeros is not None:
        parts.append(f"num zeros: {int(row.num_zeros)}")
    if row.params_norm is not None:
        parts.append(f"params norm: {row.params_norm:.3f}")
    parts.append(f"number of skipped iterations: {row.skipped_iterations:3d}")
    parts.append(f"number of nan iterations: {row.nan_iterations:3d}")
    return " " + " | ".join(parts) + " |"


@dataclass
class _Interval:
    """Sums since the last log line."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tflop_seconds: float = 0.0
    iterations: int = 0


class RunLog:
    """Log and metrics of a run; every call is a no-op on ranks that do not write.

    A context, which closes all files, and the progress bar, if an error ends it before ``close``.

    Args:
        iterations: of the whole run.
        resumed_at: the iteration after which rows of metrics are written anew.
        resolved: content of config.yaml, for W&B.
        evaluated_at: the same as ``resumed_at`` for rows of evaluations; by default that iteration.
        run_id: of W&B's run, which is continued if it exists.
    """

    def __init__(
        self,
        config: LoggingOptions,
        paths: RunPaths,
        iterations: int,
        writes: bool,
        resumed_at: int,
        resolved: Mapping[str, Any],
        evaluated_at: int | None = None,
        run_id: str | None = None,
    ) -> None:
        self._config, self._paths, self._iterations, self._writes = config, paths, iterations, writes
        self._open = writes
        self._bar: Any = None
        self._interval = _Interval()
        self._alarmed: set[str] = set()  # linear layers
        if not writes:
            return
        paths.run.mkdir(parents=True, exist_ok=True)
        _drop_rows_after(paths.metrics, resumed_at, resumed_at if evaluated_at is None else evaluated_at, self.say)
        _drop_rows_after(paths.quantization, resumed_at, resumed_at, self.say)
        self._metrics = paths.metrics.open("a", encoding="utf-8", buffering=1)
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(paths.tensorboard), purge_step=resumed_at + 1)
        self._wandb = _start_wandb(config, paths, resolved, run_id)
        self._start_bar(resumed_at)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(UserError):  # on a full disk the log fails as well, and the first error says more
            self._shut(failed=True)

    def say(self, *lines: str) -> None:
        """Print lines for the user, once."""
        if not self._writes:
            return
        for line in lines:
            if self._bar is not None:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                print(line, flush=True)

    def step(self, row: StepRow) -> None:
        """Record one iteration; print a log line every --log-interval."""
        if not self._writes:
            return
        self._record(row.iteration, row.consumed_samples, row.metrics(), ("lm loss",))
        interval = self._interval
        if math.isfinite(row.loss):
            interval.losses.append(row.loss)
        interval.seconds += row.seconds
        interval.tflop_seconds += row.tflops_per_gpu * row.seconds
        interval.iterations += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=row.iteration, loss=f"{row.loss:.4f}")
        if row.iteration % self._config.log_interval == 0 or row.iteration == self._iterations:
            mean = sum(interval.losses) / len(interval.losses) if interval.losses else math.nan
            seconds = interval.seconds / interval.iterations
            tflops = interval.tflop_seconds / interval.seconds
            self.say(iteration_line(row, self._iterations, mean, seconds, tflops))
            self._interval = _Interval()

    def quantization(self, iteration: int, operands: Sequence[tuple[OperandId, QuantizationError]]) -> None:
        """Record quantization errors in that iteration; print the worst, and each layer's first alarm."""
        if not self._writes:
            return
        self.say(*quantization_lines(iteration, operands))
        for linear, ratio in gradient_to_noise(operands):
            if ratio < CRITICAL_RATIO and linear not in self._alarmed:
                self._alarmed.add(linear)
                self.say(
                    f"warning: {linear}: at iteration {iteration} the norm of the weight gradient is {ratio:.2f} times "
                    "that of its quantization noise, below sqrt(3); see docs/guide/quantization-error.md"
                )
        rows = [quantization_row(iteration, place, fidelity) for place, fidelity in operands]
        with self._failing_in_a_line(), self._paths.quantization.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self._show(iteration, quantization_scalars(operands))

    def evaluation(self, iteration: int, consumed: int, split: str, loss: float, perplexity: float) -> None:
        """Print and record one validation or test result."""
        if not self._writes:
            return
        name = {"valid": "validation", "test": "test"}[split]
        line = f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | "
        self.say("-" * len(line), line, "-" * len(line))
        key = f"lm loss {name}"
        self._record(iteration, consumed, {key: loss, f"{key} ppl": perplexity}, (key,))

    def close(self, *, failed: bool = False) -> None:
        """Flush, and print the location of all files; W&B shows a run that has ``failed`` as such."""
        self._shut(failed)
        self.say(*self._paths.lines())

    def _shut(self, failed: bool) -> None:
        if not self._open:
            return
        self._open = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
        with self._failing_in_a_line(), closing(self._metrics):
            self._board.close()

    def _record(self, iteration: int, consumed: int, metrics: dict[str, float], losses: tuple[str, ...]) -> None:
        exact = {f"{key} hex": metrics[key].hex() for key in losses}
        row = {"iteration": iteration, "consumed samples": consumed, **metrics, **exact}
        with self._failing_in_a_line():
            self._metrics.write(json.dumps(row) + "\n")
        self._show(iteration, metrics)

    def _show(self, iteration: int, scalars: dict[str, float]) -> None:
        """Write scalars to TensorBoard and W&B."""
        with self._failing_in_a_line():
            for key, value in scalars.items():
                self._board.add_scalar(key, value, iteration)
        if self._wandb is not None:
            self._wandb.log(scalars, step=iteration)

    @contextmanager
    def _failing_in_a_line(self) -> Iterator[None]:
        """Report write errors as one line: on a full disk the log often fails first, during an asynchronous save."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self._paths.run}: metrics could not be written: {error.strerror or error}; checkpoints that were "
                "saved stay; make room or mend the disk, and start the run again"
            ) from None

    def _start_bar(self, resumed_at: int) -> None:
        if not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("", total=self._iterations, completed=resumed_at, loss="?")
        self._bar.start()


def _drop_rows_after(metrics: Path, iteration: int, evaluated: int, say: Callable[[str], None]) -> None:
    """Drop rows that a resumed run writes again, and damaged lines, such as the last one of a killed process.

    These are training rows after ``iteration`` and evaluation rows after ``evaluated``: a run may stop between both.
    """
    if not metrics.exists():
        return
    rows = json_lines(metrics, say, check_iteration)
    kept = [row for row in rows if row["iteration"] <= (iteration if "lm loss" in row else evaluated)]
    atomic_write(metrics, "".join(json.dumps(row) + "\n" for row in kept))


def _start_wandb(config: LoggingOptions, paths: RunPaths, resolved: Mapping[str, Any], run_id: str | None) -> Any:
    """W&B's run of that id, continued if it exists; rows of iterations that it has are dropped there."""
    if not config.wandb_project:
        return None
    import wandb

    return wandb.init(
        project=config.wandb_project,
        entity=config.wandb_entity,
        name=config.wandb_exp_name or paths.run.name,
        dir=config.wandb_save_dir or str(paths.run),
        config=dict(resolved),
        id=run_id,
        resume="allow",
    )
