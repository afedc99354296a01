"""What two ranks make of a reason to stop that only one of them has."""

from __future__ import annotations

import multiprocessing
import time
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


def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=ask, args=(rank, str(tmp_path / "store"), answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    # A step later than the one that it happened in.
    expected = {event: (4, reason) for event, reason in EVENTS.items() if reason is not None}
    assert found == {0: expected, 1: expected}
