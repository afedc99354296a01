"""Progress of running jobs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lowprec.errors import printable
from megatron_lowprec.sweep import status
from megatron_lowprec.sweep.status import Progress, duration

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_LOG_LINES = 15  # of a failed job


class View:
    """Reports starts and ends of jobs; as a context manager it shows the live table on a terminal."""

    def __init__(self, out: Path, ids: Sequence[str], evaluate: Sequence[str] = (), seconds: float = 1.0) -> None:
        from rich.console import Console

        self._out, self._ids, self._evaluate, self._seconds = out, ids, evaluate, seconds
        self._console = Console()
        self._live: Live | None = None
        self._drawn = 0.0
        self.on_terminal = self._console.is_terminal

    def __enter__(self) -> View:
        if self.on_terminal:
            from rich.live import Live

            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        """Print a line above the table."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def ended(self, job_id: str, state: str, seconds: float, progress: Progress, exit_code: int, log: Path) -> None:
        """Report the end of a job, with the end of its log if it failed."""
        loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
        valid = "" if progress.validation is None else f", validation {progress.validation:.4f}"
        code = f" with exit code {exit_code}" if state == "failed" else ""
        where = f" at iteration {progress.iteration}" if state != "done" else ""
        self.say(f"{job_id}: {state}{code}{where} after {duration(seconds)}{loss}{valid}")
        if state == "failed":
            text = log.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in text[-_LOG_LINES:]:
                self.say(f"    {printable(line)}")
            self.say(f"    all of it: {log}")

    def refresh(self) -> None:
        """Redraw the table if it is older than ``seconds``."""
        if self._live is not None and time.monotonic() - self._drawn > self._seconds:
            self._live.update(self._table(), refresh=True)
            self._drawn = time.monotonic()

    def _table(self) -> Table:
        found = [status.row(self._out, job_id, self._evaluate) for job_id in self._ids]
        room = max(5, self._console.size.height - 8)
        shown = found if len(found) <= room else [row for row in found if row.state in ("running", "failed")][-room:]
        return status.table(shown, status.summary(found))
