"""The driver in this process, one process of a world of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

from megatron_lowprec.training import startup
from megatron_lowprec.training.run import run

Drive = Callable[[list[str]], None]


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """Run the driver with a command line in an empty folder; raises its UserError."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()

    def call(arguments: list[str]) -> None:
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.delenv("MASTER_PORT", raising=False)
        run(arguments, startup.prepare_environment())

    yield call
    torch.set_num_threads(threads)
    if dist.is_initialized():
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
