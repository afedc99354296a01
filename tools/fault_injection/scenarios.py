"""The faults. After each, the run must continue to the losses of an undisturbed run, bit for bit."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lowprec.training.checkpoint import storage
from tools.fault_injection.run import REPOSITORY, Failure, Run, exact, newest

# Two layers, dropout on; delayed scaling, Hadamard transforms and stochastic rounding in one recipe.
SAVE_INTERVAL, EVAL_INTERVAL = 10, 25
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --lr-decay-iters 1000 --bf16 --recipe fp8_mxfp4_rht_sr "
    "--use-distributed-optimizer --mock-data --tokenizer-type NullTokenizer --vocab-size 255 "
    f"--eval-iters 12 --eval-interval {EVAL_INTERVAL} --save-interval {SAVE_INTERVAL} --log-interval 1 --keep-last 3"
).split()
ASYNC = ["--async-save"]


@dataclass
class Outcome:
    """One row of the table."""

    fault: str
    times: int = 0
    in_a_save: int = 0
    most_lost: int = 0
    slowest_end: float = 0.0
    left_over: int = 0
    notes: list[str] = field(default_factory=list)
    failure: str | None = None


class Scenarios:
    """All faults against one reference run.

    Args:
        folder: for all files.
        seed: of the random times.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self._random = random.Random(seed)
        self._reference: list[tuple[int, str, str]] = []
        self._save_seconds = 0.1
        self._iterations = 0
        self._run: Run | None = None

    def reference(self, iterations: int) -> None:
        """Run undisturbed, for as many iterations as the longest scenario needs."""
        self._iterations = iterations
        run = self._start(self.folder / "reference", [])
        times: list[float] = []
        for _ in range(3):
            run.wait_for_save()
            started = time.monotonic()
            run.wait(lambda: not run.partial(), "the end of a save", poll=0.0005)
            times.append(time.monotonic() - started)
        run.finish()
        self._save_seconds = sorted(times)[1]
        self._reference = exact(run.save)

    def kills(self, fault: str, whom: str, times: int, in_save: int, more: list[str]) -> Outcome:
        """``kill -9`` of each start of a run at a random time; at least ``in_save`` kills come during a save."""
        outcome, save = Outcome(fault), self._folder(fault)
        while outcome.times < times or outcome.in_a_save < in_save:
            if newest(save) + 3 * SAVE_INTERVAL > self._iterations:
                outcome.notes.append("the run ended before the last kill")
                break
            run = self._start(save, more)
            self._wait_a_random_time(run, in_save=outcome.in_a_save < in_save)
            reached = run.iteration
            if whom == "one":
                run.kill_rank(self._random.randrange(2))
            else:
                run.kill_all()
            self._after(run, outcome, reached)
            if whom == "one" and "Signal 9 (SIGKILL)" not in run.printed.rpartition("Root Cause")[2]:
                outcome.notes.append(f"torchrun names another root cause: {run.log.name}")
        return self._finish(save, outcome, more)

    def signals(self, fault: str, number: signal.Signals, place: str, times: int, more: list[str]) -> Outcome:
        """A signal to torchrun, which forwards it to every process; no step may be lost."""
        cut_off, outcome, save = 0, Outcome(fault), self._folder(fault)
        for _ in range(times):
            # Data loader workers are processes that receive the signal as well.
            run = self._start(save, [*more, "--num-workers", "1"])
            before = run.iteration
            if place == "a start":
                run.wait(partial(run.listen, number), "ranks that listen", poll=0.01)
                time.sleep(self._random.uniform(0.0, 4.0))
            elif place == "an evaluation":
                due = (before // EVAL_INTERVAL + 1) * EVAL_INTERVAL
                run.wait_for_iteration(due)
                time.sleep(self._random.uniform(0.0, 0.05))
            else:
                self._wait_a_random_time(run, in_save=place == "a save")
            inside, reached = bool(run.partial()), run.iteration
            run.send(number)
            self._end(run, outcome, inside)
            request = save / "requeue"
            if not request.exists():
                raise Failure(f"no {request}: {run.log}")
            started_anew = "before the first step" in request.read_text()
            # A step in progress is finished, and the checkpoint holds the last step.
            if not started_anew and (newest(save) < reached or newest(save) != run.iteration):
                raise Failure(f"reached {run.iteration}, but saved {newest(save)}: {run.log}")
            outcome.notes += ["ended before the first step"] * started_anew
            self._same_so_far(save, run)
            at_end = {(iteration, key) for iteration, key, _ in exact(save)}
            cut_off += place == "an evaluation" and (newest(save), "lm loss validation hex") not in at_end
        if place == "an evaluation":
            outcome.notes.append(f"{cut_off} of {times} cut an evaluation off, the others came right after it")
        return self._finish(save, outcome, more)

    def damage(self, fault: str, happen: Callable[[Path], Any], lost: int) -> Outcome:
        """Damage the folder of a run after two and a half save intervals, and let the run continue."""
        outcome, save = Outcome(fault, times=1, most_lost=lost), self._folder(fault)
        self._start(save, ["--exit-interval", "25"]).finish()
        happen(save)
        before = newest(save)
        run = self._start(save, [])
        run.finish()
        words = f"at iteration {25 - lost}"
        if words not in run.printed:
            raise Failure(f"continued elsewhere than {words} (latest {before}): {run.log}")
        said = [line for line in run.printed.splitlines() if "cannot be loaded" in line or "damaged" in line]
        outcome.notes += [line.strip() for line in said]
        return self._finish(save, outcome, [], started=True)

    def full_disk(self, fault: str, more: list[str]) -> Outcome:
        """Fill the file system while a checkpoint is written to it."""
        # Only --save is on the small disk; the log is not.
        outcome, save = Outcome(fault, times=1), self._folder(fault) / "out"
        _, checkpoint = max(storage.whole(str(self.folder / "reference")).items())
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        with _small_disk(save, 5 * size + 4 * 2**20) as kind:
            outcome.notes.append(kind)
            run = self._start(save, more)
            run.wait(lambda: newest(save) >= SAVE_INTERVAL, "the first checkpoint")
            ballast = save / "ballast"
            with ballast.open("wb") as file:
                file.write(bytes(max(0, shutil.disk_usage(save).free - size // 2)))
            code, outcome.slowest_end = run.ended()
            reached = run.iteration
            # During an asynchronous save, writing the next metrics may fail before the checkpoint does.
            if not code or "could not be written" not in run.printed or "[rank 0] Traceback" in run.printed:
                raise Failure(f"exit code {code} without an error about the full disk: {run.log}")
            outcome.in_a_save, outcome.most_lost = 1, reached - newest(save)
            outcome.left_over = run.left_over()
            self._same_so_far(save, run)
            ballast.unlink()
            return self._finish(save, outcome, more)

    def stuck_rank(self, fault: str) -> Outcome:
        """``kill -9`` of one rank while the other is stuck in C++ code, as under NCCL."""
        outcome, save = Outcome(fault), self._folder(fault)
        script = REPOSITORY / "tools/fault_injection/stuck_rank.py"
        timeout = ("--shutdown-timeout", "3000") if _knows_shutdown_timeout() else ()
        if not timeout:
            outcome.notes.append("this torchrun has no --shutdown-timeout and kills ranks after 30 s")
        run = self._start(save, [], script, timeout)
        run.wait(lambda: "rank 0 is stuck" in run.printed, "a stuck rank")
        reached = run.iteration
        run.kill_rank(1)
        self._after(run, outcome, reached)
        return self._finish(save, outcome, [])

    def stop(self) -> None:
        """Kill the run in progress."""
        if self._run is not None:
            self._run.kill_all()

    def _folder(self, fault: str) -> Path:
        return self.folder / fault.replace(" ", "_").replace(",", "")

    def _start(self, save: Path, more: list[str], script: Path | None = None, launcher: tuple[str, ...] = ()) -> Run:
        self._run = Run(save, [*MODEL, "--train-iters", str(self._iterations), *more], script, launcher)
        return self._run

    def _wait_a_random_time(self, run: Run, in_save: bool) -> None:
        """Wait for some steps or saves, and then for part of a step or of a save."""
        start = newest(run.save)
        if in_save:
            if self._random.random() < 0.5:
                run.wait(lambda: newest(run.save) > start, "a save")
            run.wait_for_save()
            time.sleep(self._random.uniform(0.0, self._save_seconds))
        else:
            run.wait_for_iteration(start + self._random.randint(1, 3 * SAVE_INTERVAL // 2))
            time.sleep(self._random.uniform(0.0, 0.1))

    def _after(self, run: Run, outcome: Outcome, reached: int) -> None:
        """Record how a killed start ended, and check its losses."""
        self._end(run, outcome)
        reached = max(reached, run.iteration)
        outcome.most_lost = max(outcome.most_lost, reached - newest(run.save))
        self._same_so_far(run.save, run)

    def _end(self, run: Run, outcome: Outcome, inside: bool | None = None) -> None:
        """Wait for the end of a start; ``inside``: whether the fault came in a save (default: one is incomplete)."""
        _, seconds = run.ended()
        outcome.times += 1
        outcome.in_a_save += bool(run.partial()) if inside is None else inside
        outcome.slowest_end = max(outcome.slowest_end, seconds)
        outcome.left_over += run.left_over()

    def _same_so_far(self, save: Path, run: Run) -> None:
        expected = set(self._reference)
        for row in exact(save):
            if row not in expected:
                raise Failure(f"the loss differs from the undisturbed run's, {row}: {run.log}")

    def _finish(self, save: Path, outcome: Outcome, more: list[str], started: bool = False) -> Outcome:
        """Let the run continue to its end, and compare all losses."""
        run = self._start(save, more)
        continued = newest(save)
        run.finish()
        if continued and not started and f"at iteration {continued}" not in run.printed:
            raise Failure(f"did not continue at iteration {continued}: {run.log}")
        if exact(save) != self._reference:
            raise Failure(f"losses differ from the undisturbed run's: {run.log}")
        if outcome.left_over:
            outcome.failure = f"{outcome.left_over} processes were left over"
        return outcome


@contextlib.contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[str]:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        raise Failure("a small tmpfs cannot be mounted here; this fault needs root")
    try:
        yield f"tmpfs of {size / 2**20:.0f} MiB"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _knows_shutdown_timeout() -> bool:
    from torch.distributed.run import get_args_parser

    return "--shutdown-timeout" in get_args_parser()._option_string_actions


def truncate_shard(save: Path) -> None:
    """Cut the largest file of the newest checkpoint in half."""
    folder = storage.iteration_folder(str(save), newest(save))
    shard = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def corrupt_tracker(save: Path) -> None:
    """Overwrite ``latest`` with bytes that are not text."""
    (save / storage.TRACKER).write_bytes(b"\xff\xfe\x00garbage")
