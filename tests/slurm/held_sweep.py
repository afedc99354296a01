"""`megatron-lowprec sweep` whose jobs run ``driver.py``, which a test can hold up; its array's tasks run this file."""

from __future__ import annotations

from pathlib import Path

from megatron_lowprec.commands import sweep
from megatron_lowprec.sweep import cli, jobs
from megatron_lowprec.training.distributed import startup

cli.PROGRAM = (__file__,)
jobs.DRIVER = (str(Path(__file__).with_name("driver.py")),)

if __name__ == "__main__":
    startup.leave(sweep.main())
