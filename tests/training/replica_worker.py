"""Trains by the driver, then compares every weight that tensor-parallel ranks hold copies of.

``torchrun replica_worker.py OUT.json DRIVER-ARGUMENT...``. Rank 1 takes the last tiling of each tuned kernel and the
others the first, as ranks may that measure on machines of their own. OUT.json gets the names of weights whose copies
differ, and how many were compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowprec.training.distributed import startup


def differing_copies(chunks: Any) -> tuple[list[str], int]:
    """Names of replicated weights that are not bit-equal on all tensor-parallel ranks, and how many are replicated."""
    from megatron.core import parallel_state as mpu

    group, differing, compared = mpu.get_tensor_model_parallel_group(), [], 0
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            if getattr(weight, "tensor_model_parallel", False):
                continue
            copies = [torch.empty_like(weight) for _ in range(group.size())]
            dist.all_gather(copies, weight.detach().contiguous(), group=group)
            compared += 1
            if not all(torch.equal(copies[0], copy) for copy in copies):
                differing.append(name)
    return differing, compared


def main(out: Path, arguments: list[str]) -> None:
    ranks = startup.prepare_environment()
    from megatron_lowprec.kernels import tuning
    from megatron_lowprec.training import loop
    from megatron_lowprec.training.run import run

    def chosen(name: str, candidates: Any, run_one: Any, device: torch.device) -> Any:
        return candidates[-1 if ranks.rank else 0]

    train = loop.train

    def train_and_compare(state: Any) -> Any:
        stop = train(state)
        differing, compared = differing_copies(state.trainer.chunks)
        if ranks.rank == 0:
            out.write_text(json.dumps({"differing": differing, "compared": compared}))
        return stop

    tuning.fastest, loop.train = chosen, train_and_compare
    run(arguments, ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
