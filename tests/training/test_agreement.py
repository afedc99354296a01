"""What two ranks make of what only one of them has: a reason to stop, work to do first."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

STEPS = 6
# What rank 1 alone has before its third question, and what both ranks then stop for.
EVENTS: dict[str, str | None] = {"signal": "SIGUSR1", "clock": "--exit-duration-in-mins 1.0", "nothing": None}


def ask(rank: int, store: str, answers: Any) -> None:
    """One rank that asks after each of its steps until it is told to stop, or has made all of them."""
    import torch.distributed as dist

    from megatron_lowprec.training.config import Config
    from megatron_lowprec.training.interrupt import Signals, StopReasons

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found: dict[str, tuple[int, str]] = {}
    for event in EVENTS:
        signals = Signals()
        stops = StopReasons(Config(exit_duration_in_mins=1.0), signals, started=time.monotonic())
        for iteration in range(1, STEPS + 1):
            time.sleep(0.05 * rank)
            if rank == 1 and iteration == 3 and event == "signal":
                signals.received = "SIGUSR1"
            if rank == 1 and iteration == 3 and event == "clock":
                stops._started -= 120
            stop = stops.after(iteration)
            if stop is not None:
                found[event] = (iteration, stop.reason)
                break
        stops.finish()
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def take_turns(rank: int, store: str, answers: Any) -> None:
    """Rank 0 takes longer over its turn than a collective may; the second turns are short."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from megatron_lowprec.training.agreement import in_turn, patient_group

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    began: list[float] = []

    def work() -> str:
        began.append(time.time())
        time.sleep(8 * (rank == 0))
        return f"{rank} is done"

    groups = [len(_world.pg_map)]
    with patient_group() as group:
        first = in_turn(rank == 0, work, group)
        second = in_turn(rank == 1, lambda: f"{rank} again", group)
        groups.append(len(_world.pg_map))
    groups.append(len(_world.pg_map))
    answers.put((rank, ([first, second], began[0], groups)))
    dist.barrier()
    dist.destroy_process_group()


def answers_of(work: Callable[[int, str, Any], None], tmp_path: Path) -> dict[int, Any]:
    """What two processes answer."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=work, args=(rank, str(tmp_path / "store"), answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    return found


def test_who_waits_for_work_waits_as_long_as_it_takes(tmp_path: Path) -> None:
    found = answers_of(take_turns, tmp_path)
    assert [found[rank][0] for rank in range(2)] == [[f"{rank} is done", f"{rank} again"] for rank in range(2)]
    assert all(found[rank][2] == [1, 2, 1] for rank in range(2))  # one group, and it has ended
    assert found[1][1] - found[0][1] > 7.5


def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    found = answers_of(ask, tmp_path)
    # A step later than the one that it happened in.
    expected = {event: (4, reason) for event, reason in EVENTS.items() if reason is not None}
    assert found == {0: expected, 1: expected}
