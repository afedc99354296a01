"""One process at a time runs a job. A job's own process outlives a sweep that was killed, and then holds it alone."""

from __future__ import annotations

from pathlib import Path

from megatron_lowprec.training.distributed import process_lock
from megatron_lowprec.training.distributed.process_lock import Holder, ProcessLock

FOLDER = "locks"


class Lock(ProcessLock):
    """The right to run one job of the sweep in ``out``."""

    def __init__(self, out: Path, job_id: str) -> None:
        super().__init__(out / FOLDER / job_id)


def holder(out: Path, job_id: str) -> Holder | None:
    """Who runs a job; None where it is free, as ``process_lock.holder``."""
    return process_lock.holder(out / FOLDER / job_id)
