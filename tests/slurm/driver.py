"""pretrain_gpt.py that a test can hold up, by files in the working folder.

``hold``: while it is there no step but the first two begins before this process was sent a signal.
``save_seconds``: so much longer takes a save. ``hold_save``: while it is there no save begins.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron_lowprec.training.distributed import startup
from tests.waiting import wait_for


def main(argv: list[str]) -> int:
    """``pretrain_gpt.main``, with patience."""
    startup.prepare_environment()
    from megatron_lowprec.training import loop
    from megatron_lowprec.training.checkpoint.writer import CheckpointWriter
    from megatron_lowprec.training.distributed.interrupt import Signals

    step, save, on_signal, told = loop.train_step, CheckpointWriter.save, Signals._on_signal, list[int]()

    def hears(self: Signals, number: int, frame: Any) -> None:
        told.append(number)
        on_signal(self, number, frame)

    def held(*arguments: Any) -> Any:
        if arguments[3] >= 2:
            wait_for(lambda: told or not Path("hold").exists(), "a signal, or the end of the hold")
        return step(*arguments)

    def long(*arguments: Any) -> None:
        if Path("save_seconds").exists():
            time.sleep(float(Path("save_seconds").read_text()))
        wait_for(lambda: not Path("hold_save").exists(), "the end of the hold")
        save(*arguments)

    setattr(Signals, "_on_signal", hears)  # noqa: B010
    setattr(loop, "train_step", held)  # noqa: B010 - a stand-in of another type
    setattr(CheckpointWriter, "save", long)  # noqa: B010
    return pretrain_gpt.main(argv)


if __name__ == "__main__":
    startup.leave(main(sys.argv[1:]))
