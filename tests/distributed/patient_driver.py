"""The driver, whose ranks give each other as long as it takes where they count seconds."""

from __future__ import annotations

import sys

import pretrain_gpt
from megatron_lowprec.training.distributed import startup, watchdog
from tests.waiting import PATIENCE

startup.HEAD_START = watchdog.GRACE = PATIENCE

if __name__ == "__main__":
    startup.leave(pretrain_gpt.main(sys.argv[1:]))
