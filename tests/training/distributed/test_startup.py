"""What a process does before it computes."""

from __future__ import annotations

import os
import signal
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron_lowprec.commands import evaluate, import_megatron
from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.distributed import interrupt, startup
from tests.refusal import refused
from tests.waiting import PATIENCE

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
    prepare(monkeypatch, processes, TORCHELASTIC_RUN_ID="run" if torchrun else None, OMP_NUM_THREADS=chosen)
    assert os.environ["OMP_NUM_THREADS"] == str(threads)


def test_threads_without_work_sleep_soon_unless_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, 1)
    assert os.environ["GOMP_SPINCOUNT"] == "10000"
    prepare(monkeypatch, 1, GOMP_SPINCOUNT="5")
    assert os.environ["GOMP_SPINCOUNT"] == "5"
    prepare(monkeypatch, 1, OMP_WAIT_POLICY="ACTIVE")
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") for value in ("x", "-1")),
        *(("OMP_NUM_THREADS", value) for value in ("abc", "0", "-2", "4,2", "1" * 5000, "\x1b[2J")),
        ("WORLD_SIZE", None),
        ("RANK", "2"),
        ("MASTER_PORT", "http"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_a_variable_that_is_no_number_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str | None
) -> None:
    """Every program says so in a line: those that start ranks, and the tools."""
    with pytest.raises(UserError, match=f"{name}[ =]") as error:
        prepare(monkeypatch, 2, **{"OMP_NUM_THREADS": "1", name: value})
    assert str(error.value).isprintable()
    if name != "RANK":
        assert pretrain_gpt.main(["--list-recipes"]) == 2
        assert capsys.readouterr().err.startswith("pretrain_gpt.py: error: ")
        assert evaluate.main(["--load", "out"]) == 2
        assert import_megatron.main(["--load", "out", "--save", "new", "--vocab-size", "9"]) == 2


@pytest.mark.parametrize(("chosen", "processes", "channels"), [(None, 1, "1"), ("8", 1, "8"), (None, 2, None)])
def test_nccl_has_one_channel_in_a_process_alone(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, processes: int, channels: str | None
) -> None:
    prepare(monkeypatch, processes, NCCL_MAX_NCHANNELS=chosen)
    assert os.environ.get("NCCL_MAX_NCHANNELS") == channels


def test_a_signal_ends_the_wait_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(startup, "_PATIENCE", 0.0)
    timer, said = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)), list[str]()

    def print_and_signal(line: str, **_: object) -> None:
        said.append(line)
        timer.start()

    monkeypatch.setattr(startup, "print", print_and_signal, raising=False)
    with interrupt.Signals().listening(), pytest.raises(interrupt.Interrupted):
        startup._rendezvous(startup.Ranks(0, 2, 0, 2), timedelta(seconds=PATIENCE))
    assert said == [f"rank 0 waits for 2 ranks at 127.0.0.1:{port}"]
    dist.TCPStore("127.0.0.1", port, 2, is_master=False)  # for whom the other thread still waits


@pytest.mark.parametrize(
    ("name", "said"), [("MASTER_ADDR", "MASTER_ADDR is not set"), ("MASTER_PORT", "MASTER_PORT is")]
)
def test_where_the_ranks_meet_is_required(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    for each, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(each, value)
    monkeypatch.delenv(name)
    with refused(f"the environment variable {name} is not set"):
        startup._rendezvous(startup.Ranks(0, 2, 0, 2), timedelta(seconds=1))


def test_a_place_where_the_ranks_do_not_meet_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with refused("rank 0 did not meet the other 1 at 127.0.0.1", "check MASTER_ADDR and MASTER_PORT"):
            startup._rendezvous(startup.Ranks(0, 2, 0, 2), timedelta(seconds=PATIENCE))


def test_nccl_opens_communicators_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device_id it opens one for each process group at once."""
    asked: dict[str, object] = {}

    def init_process_group(backend: str, **options: object) -> None:
        asked.update(options, backend=backend)

    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setattr(startup, "_device", lambda ranks: torch.device("cuda", 0))
    monkeypatch.setattr(startup, "lay_out", lambda config: None)
    monkeypatch.setattr(startup, "_rendezvous", lambda ranks, timeout: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    try:
        startup.initialize(Config(), startup.Ranks(0, 2, 0, 2))
    finally:
        torch.autograd.set_multithreading_enabled(True)
    assert asked["backend"] == "nccl"
    assert asked.get("device_id") is None


def prepare(monkeypatch: pytest.MonkeyPatch, processes: int, **chosen: str | None) -> None:
    """``prepare_environment`` of rank 0 under the variables that are not None, all put back after the test."""
    for name in (
        *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TORCHELASTIC_RUN_ID"),
        *("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MAX_NCHANNELS"),
    ):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    sizes = {"RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(processes)}
    for name, value in (sizes | chosen).items():
        if value is not None:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    startup.prepare_environment()
