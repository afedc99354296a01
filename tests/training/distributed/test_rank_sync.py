"""What two ranks make of what only one of them has: a reason to stop, work to do first."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.launch import forks
from tests.waiting import PATIENCE, wait_for

STEPS = 6
MINUTES = 1e6
# What rank 1 alone has before its third question, and what both ranks then stop for.
EVENTS: dict[str, str | None] = {"signal": "SIGUSR1", "clock": f"--exit-duration-in-mins {MINUTES}", "nothing": None}


def ask(rank: int, store: str, answers: Any) -> None:
    """One rank that asks after each of its steps until it is told to stop, or has made all of them."""
    import torch.distributed as dist

    from megatron_lowprec.training.distributed.interrupt import Signals, StopReasons
    from megatron_lowprec.training.distributed.rank_sync import lines_of_ranks
    from megatron_lowprec.training.options.training_options import TrainingOptions

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    assert lines_of_ranks(["both", f"rank {rank}"]) == ["both", "rank 0", "rank 1"]
    found: dict[str, tuple[int, str]] = {}
    for event in EVENTS:
        signals = Signals()
        stops = StopReasons(TrainingOptions(exit_duration_in_mins=MINUTES), 10, signals, started=time.monotonic())
        for iteration in range(1, STEPS + 1):
            time.sleep(0.05 * rank)  # one rank lags behind
            if rank == 1 and iteration == 3 and event == "signal":
                signals.received = "SIGUSR1"
            if rank == 1 and iteration == 3 and event == "clock":
                stops._started -= 60 * MINUTES
            stop = stops.after(iteration)
            if stop is not None:
                found[event] = (iteration, stop.reason)
                break
        stops.finish()
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def take_turns(rank: int, store: str, answers: Any) -> None:
    """Rank 0 has the first turn, rank 1 the second; then the other way round."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from megatron_lowprec.training.distributed.rank_sync import long_timeout_group, rank0_first

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    waits, done = Path(f"{store}.waits"), Path(f"{store}.done")
    gather, asked = dist.all_gather_object, list[dist.ProcessGroup | None]()

    def gathering(objects: list[Any], mine: Any, group: dist.ProcessGroup | None = None) -> None:
        asked.append(group)
        gather(objects, mine, group)

    setattr(dist, "all_gather_object", gathering)  # noqa: B010 - a stand-in of another type

    def work() -> tuple[str, bool]:
        if rank == 0:
            wait_for(waits.exists, "the other rank")
            time.sleep(0.5)  # for a rank that does not wait
            done.touch()
        return f"{rank} is done", done.exists()

    groups = [len(_world.pg_map)]
    with long_timeout_group() as group:
        assert group is not None
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        if rank == 1:
            waits.touch()
        first = rank0_first(rank == 0, work, group)
        second = rank0_first(rank == 1, lambda: f"{rank} again", group)
        groups.append(len(_world.pg_map))
        alone = all(one is group for one in asked)
    groups.append(len(_world.pg_map))
    answers.put((rank, ([first, second], groups, timeout, alone, len(asked))))
    dist.barrier()
    dist.destroy_process_group()


def compare_settings(rank: int, store: str, answers: Any) -> None:
    """Ranks with equal settings, and with others on rank 1."""
    import torch.distributed as dist

    from megatron_lowprec.errors import UserError
    from megatron_lowprec.training.distributed.rank_sync import same_as_on_rank_0

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    same_as_on_rank_0({"--seed": 1})
    others = {"--lr": 0.1, "--recipe": "x" * 100, "--seed": 1, "--swiglu": True, "--tied": True, "alone": 1}
    try:
        same_as_on_rank_0({"--seed": 1} if rank == 0 else others)
    except UserError as error:
        answers.put((rank, str(error)))
    dist.destroy_process_group()


def answers_of(work: Callable[[int, str, Any], None], tmp_path: Path) -> dict[int, Any]:
    """What two processes answer."""
    context = forks()
    answers = context.Queue()
    ranks = [context.Process(target=work, args=(rank, str(tmp_path / "store"), answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=PATIENCE) for _ in ranks)
    for process in ranks:
        process.join(PATIENCE)
    assert [process.exitcode for process in ranks] == [0, 0]
    return found


@pytest.mark.parametrize(("backend", "devices"), [("nccl", [3]), ("gloo", None)])
def test_a_barrier_runs_on_this_process_s_gpu(
    monkeypatch: pytest.MonkeyPatch, backend: str, devices: list[int] | None
) -> None:
    import torch

    from megatron_lowprec.training.distributed import rank_sync

    asked: list[object] = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.distributed, "barrier", lambda device_ids: asked.append(device_ids))
    rank_sync.barrier()
    assert asked == [devices]


@pytest.mark.slow
def test_who_waits_for_work_waits_as_long_as_it_takes(tmp_path: Path) -> None:
    found = answers_of(take_turns, tmp_path)
    for rank in range(2):
        results, groups, timeout, alone, gathered = found[rank]
        assert results == [(f"{rank} is done", True), f"{rank} again"]
        assert groups == [1, 2, 1]  # one group, and it has ended
        # a rank waits in no collective of a group that gives up after --distributed-timeout-minutes
        assert (timeout, alone, gathered) == (timedelta(days=7), True, 4)


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    found = answers_of(ask, tmp_path)
    # A step later than the one that it happened in.
    expected = {event: (4, reason) for event, reason in EVENTS.items() if reason is not None}
    assert found == {0: expected, 1: expected}


@pytest.mark.slow
def test_other_settings_of_a_rank_are_named_on_all(tmp_path: Path) -> None:
    found = answers_of(compare_settings, tmp_path)
    assert found[0] == found[1]
    here, first = found[0].split(", where rank 0 has ")
    assert here == f"rank 1 has --lr 0.1, --recipe {'x' * 60}, --swiglu True (and 2 more)"
    assert first.startswith("--lr None, --recipe None, --swiglu None; start all ranks with the same flags")
