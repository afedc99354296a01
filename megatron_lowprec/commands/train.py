"""Train on this machine: a process for each GPU, or two on a CPU. Within torchrun, one rank of its run.

    megatron-lowprec train --recipe mxfp4_rht_sr
    torchrun --nnodes 2 ... -m megatron_lowprec train --config gpt_345m --recipe mxfp8 --data-path corpus_text_document

CUDA_VISIBLE_DEVICES selects GPUs. The flags are those of pretrain_gpt.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.training import driver
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.distributed import startup

_ON_CPU = 2  # processes, as `make train` and the shipped losses of gpt_tiny have


def main(arguments: Sequence[str] | None = None, program: str = "megatron-lowprec train") -> int:
    """Exit code of the driver; does not return if several processes train."""
    argv = sys.argv[1:] if arguments is None else arguments
    if "RANK" in os.environ:
        return driver.main(argv, program)
    try:  # an error of the command line is one line, ahead of torchrun's start
        config, given, _ = parse(argv)
        if "recipe" in given:
            load_recipe(config.recipe, config.recipe_override)
    except UserError as error:
        return startup.fail(program, error)
    if config.list_recipes or config.explain_recipe or config.memory_plan:
        return driver.main(argv, program)

    processes = _processes()
    return driver.main(argv, program) if processes == 1 else _become_torchrun(processes, argv)


def _processes() -> int:
    import torch

    return torch.cuda.device_count() or min(_ON_CPU, len(os.sched_getaffinity(0)))


def _become_torchrun(processes: int, argv: Sequence[str]) -> NoReturn:
    """Replace this process, so that signals reach torchrun."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "megatron_lowprec", "train", *argv])
