"""``--manual-gc``: Python's garbage collections at the same place on all ranks.

A collection takes some 100 ms in a large process, and all ranks wait for the one that collects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lowprec.training.options.training_options import TrainingOptions


class ManualGc:
    """A context in which only ``after`` and ``evaluation`` collect garbage; no-op without --manual-gc."""

    def __init__(self, config: TrainingOptions) -> None:
        self._on, self._interval = config.manual_gc, config.manual_gc_interval
        self._around_evaluations = config.manual_gc and not config.no_manual_gc_eval

    def __enter__(self) -> ManualGc:
        if self._on:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *error: object) -> None:
        if self._on:
            gc.enable()

    def after(self, iteration: int) -> None:
        """Collect if ``iteration`` is one of --manual-gc-interval."""
        if self._on and self._interval and iteration % self._interval == 0:
            gc.collect()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Collect before an evaluation, and what it leaves behind."""
        if not self._around_evaluations:
            yield
            return
        gc.collect()
        try:
            yield
        finally:
            gc.collect(generation=0)
