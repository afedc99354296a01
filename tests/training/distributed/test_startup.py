"""What a process does before it computes."""

from __future__ import annotations

import os

import pytest

from megatron_lowprec.training.distributed import startup

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("chosen", "processes", "torchrun", "threads"),
    [
        (None, 1, False, CORES),
        ("1", 1, False, 1),
        ("3", 2, True, 3),
        # torchrun sets 1 for several processes if the variable is unset
        ("1", 2, True, max(1, CORES // 2)),
        ("1", 1, True, 1),
        (None, 1, True, CORES),
    ],
)
def test_threads_of_a_process(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, processes: int, torchrun: bool, threads: int
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(processes)}
    environment |= {"TORCHELASTIC_RUN_ID": "run"} if torchrun else {}
    environment |= {"OMP_NUM_THREADS": chosen} if chosen is not None else {}
    prepare(monkeypatch, environment)
    assert os.environ["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(("chosen", "processes", "channels"), [(None, 1, "1"), ("8", 1, "8"), (None, 2, None)])
def test_nccl_allocates_no_channels_for_a_process_alone(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, processes: int, channels: str | None
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(processes)}
    prepare(monkeypatch, environment | ({"NCCL_MAX_NCHANNELS": chosen} if chosen is not None else {}))
    assert os.environ.get("NCCL_MAX_NCHANNELS") == channels


def prepare(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """``prepare_environment`` in this environment, which is put back after the test."""
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MAX_NCHANNELS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    startup.prepare_environment()
