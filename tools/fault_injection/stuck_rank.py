"""The driver with a rank 0 that blocks in C++ code after some steps, as under NCCL when another rank has died."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import pretrain_gpt
from megatron_lowprec.training.distributed import startup

STEPS = 12


def main(argv: list[str]) -> int:
    """``pretrain_gpt.main`` with a step that never returns."""
    import torch.distributed as dist

    from megatron_lowprec.training import loop

    step = loop.train_step

    def stuck(*arguments: Any) -> Any:
        if dist.get_rank() == 0 and arguments[3] == STEPS:
            print("rank 0 is stuck", flush=True)
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            store.wait(["a key that is never set"], timedelta(hours=1))
        return step(*arguments)

    setattr(loop, "train_step", stuck)  # noqa: B010 - a stub of another type
    return pretrain_gpt.main(argv)


if __name__ == "__main__":
    startup.leave(main(sys.argv[1:]))
