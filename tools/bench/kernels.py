"""Kernels and copies of profiled steps on a GPU: their times, the gaps between them, and communication."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

PROFILED = 3
"""Steps of a profile."""


class Kernel(NamedTuple):
    """A kernel or copy of a trace; microseconds."""

    name: str
    start: float
    end: float


def profiled(step: Callable[[], object]) -> list[Any]:
    """The GPU's kernels and copies in ``PROFILED`` consecutive steps."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    return [event for event in profiler.events() if event.device_type == DeviceType.CUDA]


def kernels_of(events: Sequence[Any]) -> list[dict[str, Any]]:
    """Kernels of a step by name, with count and own time; longest first."""
    found = by_name((event.name, event.self_device_time_total / 1e3) for event in events)
    return [{"name": name, "times": len(ms) / PROFILED, "ms": sum(ms) / PROFILED} for name, ms in found]


def by_name(times: Iterable[tuple[str, float]]) -> list[tuple[str, list[float]]]:
    """The times of each name, largest sum first."""
    taken: dict[str, list[float]] = defaultdict(list)
    for name, time in times:
        taken[name[:200]].append(time)
    return sorted(taken.items(), key=lambda each: -sum(each[1]))


def idle_of(events: Sequence[Any]) -> dict[str, Any]:
    """Idle milliseconds of a step, the number of gaps, and the longest gaps."""
    gaps: list[dict[str, Any]] = []
    last = None
    for event in sorted(events, key=lambda event: event.time_range.start):
        if last is not None and event.time_range.start > last.time_range.end:
            ms = (event.time_range.start - last.time_range.end) / 1e3
            gaps.append({"ms": ms, "after": last.name[:80], "before": event.name[:80]})
        if last is None or event.time_range.end > last.time_range.end:
            last = event
    longest = sorted(gaps, key=lambda gap: -gap["ms"])[:12]
    return {"ms": sum(gap["ms"] for gap in gaps) / PROFILED, "gaps": len(gaps) / PROFILED, "longest": longest}


def communication_of(events: Sequence[Any]) -> dict[str, float]:
    """Milliseconds of a step in which a kernel of NCCL runs, and those of them in which no other kernel does.

    A kernel of NCCL includes its wait for the other ranks.
    """
    ordered = sorted(events, key=lambda event: event.time_range.start)
    kernels = [Kernel(event.name, event.time_range.start, event.time_range.end) for event in ordered]
    of_nccl = [kernel for kernel in kernels if "nccl" in kernel.name.lower()]
    others = [kernel for kernel in kernels if "nccl" not in kernel.name.lower()]
    found = {"ms": covered(of_nccl), "exposed_ms": covered(kernels) - covered(others)}
    return {name: microseconds / PROFILED / 1e3 for name, microseconds in found.items()}


def covered(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which any of the kernels runs, which are in the order of their start."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(until, kernel.start))
        until = max(until, kernel.end)
    return total
