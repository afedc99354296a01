"""torch's profiler from --profile-step-start to --profile-step-end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from megatron_lowprec.training.options.training_options import TrainingOptions


class Profiler:
    """Context that writes a Chrome trace per rank, ``profile/rank0.json``, into the run's folder.

    A start in the middle of the profiled iterations profiles the rest of them, into ``profile/rank0_from_N.json``, and
    an early end writes those that ran: the process would crash at its exit with a running profiler.

    Args:
        run: the run's folder.
        iteration: those completed before this start.
        say: called with a line for the log if there is no trace.
    """

    def __init__(self, config: TrainingOptions, run: Path, iteration: int, say: Callable[[str], None]) -> None:
        self._start, self._end = config.profile_step_start, config.profile_step_end
        self._wanted = config.profile
        self._folder, self._iteration, self._say = run / "profile", iteration, say
        self._profile: torch.profiler.profile | None = None
        self._begun: int | None = None

    def __enter__(self) -> Profiler:
        if self._wanted and self._iteration >= self._end:
            self._say(f"--profile: no trace, for this start is at iteration {self._iteration}, and {self._words}")
            self._wanted = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:
            self._finish(write=error is None)
        elif self._wanted and self._begun is None and error is None:
            self._say(f"--profile: no trace, for this start ended at iteration {self._iteration}, and {self._words}")

    def before(self, iteration: int) -> None:
        """Call it before each iteration; ``iteration`` counts those completed."""
        if self._wanted and self._begun is None and self._start <= iteration < self._end:
            self._begun = iteration
            self._profile = torch.profiler.profile()
            self._profile.start()

    def after(self, iteration: int) -> None:
        """Call it after each iteration, which counts as completed."""
        self._iteration = iteration
        if self._profile is not None and iteration >= self._end:
            self._finish(write=True)

    @property
    def _words(self) -> str:
        return f"--profile-step-start {self._start} --profile-step-end {self._end} are of another part of the run"

    def _finish(self, write: bool) -> None:
        assert self._profile is not None
        profile, self._profile = self._profile, None
        profile.stop()
        if write:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = "" if self._begun == self._start else f"_from_{self._begun}"
            profile.export_chrome_trace(str(self._folder / f"rank{dist.get_rank()}{part}.json"))
