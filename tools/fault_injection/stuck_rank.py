"""The driver, whose rank 0 gets stuck in C++ code after some steps, as a rank under NCCL does when another died."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import pretrain_gpt
from megatron_lowprec.training.distributed import startup

STEPS = 12


def main(argv: list[str]) -> int:
    """``pretrain_gpt.main`` with a step that never ends."""
    import torch.distributed as dist

    from megatron_lowprec.training import loop

    step = loop.train_step

    def stuck(*arguments: Any) -> Any:
        if dist.get_rank() == 0 and arguments[3] == STEPS:
            print("rank 0 is stuck", flush=True)
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            store.wait(["what never comes"], timedelta(hours=1))
        return step(*arguments)

    setattr(loop, "train_step", stuck)  # noqa: B010 - a stand-in of another type
    return pretrain_gpt.main(argv)


if __name__ == "__main__":
    startup.leave(main(sys.argv[1:]))
