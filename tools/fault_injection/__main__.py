"""Disturb a small run as clusters disturb large ones, and compare its losses with an undisturbed run's, bit for bit.

    python -m tools.fault_injection --kills 30 --kills-in-save 10 --out docs/results/fault-injection.md
    python -m tools.fault_injection --only SIGTERM

The run has two processes on CPU cores, under torchrun. All faults take about half an hour on two idle cores.
The exit code is 1 if a run did not survive.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatron_lowprec.errors import Parser
from megatron_lowprec.training.config.paths import output_file
from megatron_lowprec.training.distributed.startup import versions
from tools.fault_injection.run import Failure
from tools.fault_injection.scenarios import ASYNC, SAVE_INTERVAL, Outcome, Scenarios, corrupt_tracker, truncate_shard

_HEADER = """# Fault injection, {date}

`python -m tools.fault_injection {arguments}`: a model of 2 layers, hidden 64, on two processes (gloo, distributed
optimizer, bf16, `fp8_mxfp4_rht_sr`: delayed scaling, Hadamard transforms, stochastic rounding; dropout 0.1),
{iterations} iterations, a checkpoint every {interval}. Hardware: {cores} CPU cores; {versions}.

Each fault hits the same run repeatedly, once in each start; the next start continues from `--save`. All training,
validation and test losses must equal those of an undisturbed run, bit for bit, and each must be logged once.

- times: how often the fault was injected; "in a save": how many of these came during a save.
- lost: the most steps that had to be repeated. An asynchronous checkpoint counts from when it is published.
- end: the longest time from the fault to torchrun's end, in seconds; left: processes that outlived it by 10 seconds.

| fault | times | in a save | lost | end (s) | left | losses |
| --- | ---: | ---: | ---: | ---: | ---: | --- |
"""


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _plan(scenarios: Scenarios, kills: int, in_save: int, repeats: int) -> dict[str, Callable[[str], Outcome]]:
    """Row of the table -> the scenario that fills it; its argument is the row's name."""
    plan: dict[str, Callable[[str], Outcome]] = {}
    victims: list[tuple[str, list[str]]] = [("one", []), ("one", ASYNC), ("all", []), ("all", ASYNC)]
    for (whom, more), times, in_a_save in zip(victims, _split(kills, 4), _split(in_save, 4), strict=True):
        who = "one rank" if whom == "one" else "torchrun and all ranks"
        name = f"kill -9 of {who}" + (", asynchronous saves" if more else "")
        plan[name] = partial(scenarios.kills, whom=whom, times=times, in_save=in_a_save, more=more)
    plan["one rank killed, the other stuck in C++"] = scenarios.stuck_rank
    for number in (signal.SIGTERM, signal.SIGUSR1):
        for place in ("a step", "an evaluation", "a save", "a start"):
            plan[f"{number.name} in {place}"] = partial(
                scenarios.signals, number=number, place=place, times=repeats, more=[]
            )
    plan["SIGTERM in a save, asynchronous saves"] = partial(
        scenarios.signals, number=signal.SIGTERM, place="a save", times=repeats, more=ASYNC
    )
    plan["disk full in a save"] = partial(scenarios.full_disk, more=[])
    plan["disk full in a save, asynchronous"] = partial(scenarios.full_disk, more=ASYNC)
    plan["truncated shard"] = partial(scenarios.damage, happen=truncate_shard, lost=5)
    plan["corrupt latest"] = partial(scenarios.damage, happen=corrupt_tracker, lost=0)
    return plan


def _row(outcome: Outcome) -> str:
    cells = [outcome.times, outcome.in_a_save, outcome.most_lost, f"{outcome.slowest_end:.1f}", outcome.left_over]
    verdict = f"**{outcome.failure}**" if outcome.failure else "the same bits"
    return f"| {outcome.fault} | {' | '.join(map(str, cells))} | {verdict} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 where a run did not survive."""
    parser = Parser(prog="python -m tools.fault_injection", description=__doc__)
    parser.add_argument("--kills", type=int, default=8, help="number of kill -9 at random times, of all kinds")
    parser.add_argument("--kills-in-save", type=int, default=4, help="at least this many of them during a save")
    parser.add_argument("--repeats", type=int, default=2, help="number of signals of each kind in each place")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times")
    parser.add_argument("--folder", type=Path, help="keep all files here (default: temporary)")
    parser.add_argument("--out", type=output_file, help="write the page here, and its table as JSON beside it")
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fault-injection-") as temporary:
        folder = arguments.folder or Path(temporary)
        scenarios = Scenarios(folder.resolve(), arguments.seed)
        iterations = 2 * SAVE_INTERVAL * max(_split(arguments.kills, 4)) + 5 * SAVE_INTERVAL
        page = _HEADER.format(
            date=datetime.date.today().isoformat(),
            arguments=" ".join(argv),
            iterations=iterations,
            interval=SAVE_INTERVAL,
            cores=len(os.sched_getaffinity(0)),
            versions=", ".join(f"{name} {version}" for name, version in versions().items()),
        )
        started = time.monotonic()
        scenarios.reference(iterations)
        print(page, end="", flush=True)
        notes, outcomes = [], []
        for name, strike in _plan(scenarios, arguments.kills, arguments.kills_in_save, arguments.repeats).items():
            if arguments.only not in name:
                continue
            try:
                outcome = strike(name)
            except Failure as failure:
                outcome = Outcome(name, failure=str(failure))
            finally:
                scenarios.stop()
            outcomes.append(outcome)
            notes += [f"- {name}: {note}" for note in dict.fromkeys(outcome.notes)]
            page += _row(outcome) + "\n"
            print(_row(outcome), flush=True)
        end = "\n" + "\n".join(notes) + f"\n\nTook {(time.monotonic() - started) / 60:.0f} minutes.\n"
        print(end, end="", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(page + end, encoding="utf-8")
            table = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
            arguments.out.with_suffix(".json").write_text(table + "\n", encoding="utf-8")
        if any(outcome.failure is not None for outcome in outcomes):
            parser.exit(1, f"{parser.prog}: a run did not survive; --folder keeps its logs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
