"""Waiting for events. The one limit ends a hang; it measures no machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 1800.0
"""Seconds, for machines that have other things to do."""
PATIENT_TORCHRUN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(PATIENCE))
"""Variable and value: torchrun sends SIGKILL so long after SIGTERM, and not half a minute."""


def wait_for(condition: Callable[[], object], what: str, poll: float = 0.02) -> None:
    """Until something has come about.

    Raises:
        TimeoutError: naming it.
    """
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come about within {PATIENCE:.0f} s")
        time.sleep(poll)


def ended(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Started:
    """A process whose output can be read while it runs.

    Args:
        output: file that stdout and stderr go to.
        more: of ``subprocess.Popen``.
    """

    def __init__(self, command: Sequence[str], output: Path, **more: Any) -> None:
        self._output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **more)

    @property
    def printed(self) -> str:
        return self._output.read_text()

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Until something has come about; fails with the process's output if the process ends first."""
        wait_for(lambda: condition() or self.process.poll() is not None, what)
        assert condition(), f"exit code {self.process.poll()} before {what}: {self.printed}"

    def wait_for(self, words: str) -> None:
        """Until it has printed that; fails if it ends first."""
        self.wait_until(lambda: words in self.printed, f"{words!r}")

    def ended(self) -> tuple[int, str]:
        """Its exit code and its output, when it has ended."""
        code = self.process.wait(PATIENCE)
        return code, self.printed
