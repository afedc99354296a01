"""What all tests share."""

import gc
import os
import signal

import pytest

# several workers share few cores (make test); torch reads it once, and processes of tests have the same sums
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.environment import turned_gpus

WHOLE_RUNS = {"drive", "checkpoints"}
"""Fixtures that train in this process: a second or more, and a process beside it for each checkpoint."""


if (gpus := torch.cuda.device_count()) > 1:  # before the first call that starts CUDA
    os.environ["CUDA_VISIBLE_DEVICES"] = turned_gpus(gpus, os.environ)

if not torch.cuda.is_available():  # as the driver does, before a folder's conftest imports Megatron-core
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


# read at a process's first product on a GPU; runs in deterministic mode come later
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_configure() -> None:
    gc.disable()  # until tests are collected: a fifth of the time
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, and all that it would start
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if WHOLE_RUNS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    # modules and collected tests stay until the end: later collections skip half a million objects
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def weekly(request: pytest.FixtureRequest) -> bool:
    """Whether weekly cases are selected, whose runs a launch that many tests share then makes as well."""
    return any(item.get_closest_marker("weekly") for item in request.session.items)


@pytest.fixture
def generator() -> torch.Generator:
    """Seeded afresh for each test: its data depend on no other test and no order."""
    return torch.Generator().manual_seed(1234)
