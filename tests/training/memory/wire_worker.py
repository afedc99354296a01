"""``many_runs`` with the bytes counted that a rank sends in each step: ``torchrun wire_worker.py CASES.json``.

``wire.json`` gets the bytes of each run's only step on rank 0: {"backward": bytes, "update": bytes}. With n ranks and
a buffer of N bytes, an all-to-all, a reduce-scatter and an all-gather send N (n - 1) / n, an all-reduce twice as many.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TIMES = {"alltoall": 1, "reduce_scatter": 1, "allgather": 1, "allreduce": 2}


class CountedCollectives(TorchDispatchMode):
    """Adds up what this rank sends to the other one of two: half of a buffer, as above."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            (times,) = (factor for kind, factor in _TIMES.items() if name.startswith(kind))
            sizes = [  # of buffer and shard, in either order
                sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))
                for argument in args[:2]
            ]
            self.sent += times * max(sizes) / 2
        return func(*args, **(kwargs or {}))


def main(cases: Path) -> None:
    from megatron_lowprec.training import loop, step
    from tests.training import many_runs

    inner, update = loop.train_step, step.optimizer_step
    counts: list[dict[str, float]] = []

    def counted(trainer: Any, batches: Any, config: Any, iteration: int) -> Any:
        sent = {"backward": 0.0, "update": 0.0}
        counts.append(sent)
        with CountedCollectives() as mode:

            def counted_update(*arguments: Any) -> Any:
                sent["backward"] = mode.sent
                return update(*arguments)

            step.optimizer_step = counted_update
            result = inner(trainer, batches, config, iteration)
        sent["update"] = mode.sent - sent["backward"]
        if torch.distributed.get_rank() == 0:
            Path("wire.json").write_text(json.dumps(counts))
        return result

    loop.train_step = counted
    many_runs.main(cases)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
