"""The driver in this process, one process of a world of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.run import run
from tests.environment import PLACE_IN_LAUNCH
from tests.freeing import free_models
from tests.training.helpers import argv

Drive = Callable[[list[str]], None]


@contextmanager
def driving(folder: Path) -> Iterator[Drive]:
    """Run the driver with a command line in a folder; raises what the driver raises."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        for name in PLACE_IN_LAUNCH:
            monkeypatch.delenv(name, raising=False)
        threads = torch.get_num_threads()

        def call(arguments: list[str]) -> None:
            take_down()
            monkeypatch.delenv("RANK", raising=False)
            monkeypatch.delenv("MASTER_PORT", raising=False)
            run(arguments, startup.prepare_environment())

        yield call
        torch.set_num_threads(threads)
        take_down()
        free_models()


def take_down() -> None:
    """Destroy what a run that ended by an error has left."""
    if dist.is_initialized():
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """``driving`` in an empty folder."""
    with driving(tmp_path) as call:
        yield call


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --save folder with checkpoints of iterations 2 and 4 and the metrics; copy it to change it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with driving(folder) as call:
        call(argv(save="out", train_iters=4, save_interval=2, recipe="fp8_delayed", lr_decay_iters=10))
    return folder / "out"
