"""pretrain_gpt.py that a test can hold up, by files in the working folder.

``hold``: while it is there a step takes six seconds more. ``save_seconds``: so much longer takes a save.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron_lowprec.training import startup


def main(argv: list[str]) -> int:
    """``pretrain_gpt.main``, with patience."""
    startup.prepare_environment()
    from megatron_lowprec.training import loop
    from megatron_lowprec.training.checkpoint_writer import CheckpointWriter

    step, save = loop.train_step, CheckpointWriter.save

    def held(*arguments: Any) -> Any:
        end = time.monotonic() + 6
        while time.monotonic() < end and Path("hold").exists():
            time.sleep(0.05)
        return step(*arguments)

    def long(*arguments: Any) -> None:
        if Path("save_seconds").exists():
            time.sleep(float(Path("save_seconds").read_text()))
        save(*arguments)

    setattr(loop, "train_step", held)  # noqa: B010 - a stand-in of another type
    setattr(CheckpointWriter, "save", long)  # noqa: B010
    return pretrain_gpt.main(argv)


if __name__ == "__main__":
    startup.leave(main(sys.argv[1:]))
