"""Which of a few tilings of a kernel is fastest on this machine: measured once, remembered on disk.

A tiling changes a kernel's speed, and no bits of an operand, so that ranks may choose differently. It does change the
last bits of a sum: kernels that sum are not tuned. The measurement is bounded: a
handful of candidates, some twenty launches each, on the first operand that is large enough to tell them apart, or the
first of such a size where who asks names sizes apart.
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import torch

from megatron_lowprec.files import atomic_write

SWITCH = "MEGATRON_LOWPREC_TUNE"
FOLDER = "MEGATRON_LOWPREC_CACHE"
_LAUNCHES = 20
LARGE_ENOUGH = 1 << 24
"""Entries from which an operand tells tilings apart."""

T = TypeVar("T")


def fastest(name: str, candidates: Sequence[T], run: Callable[[T], None], device: torch.device) -> T:
    """The candidate whose ``run`` takes least time on ``device``; from the cache where these were tuned for this name.

    ``candidates[0]``, unmeasured, with ``MEGATRON_LOWPREC_TUNE=0``, where the device is no GPU, or under graph capture.

    Args:
        name: what was tuned, the kernel's constants included; the candidates, the GPU's name and Triton's version are
            added.
    """
    if len(candidates) == 1 or not tunes(device):
        return candidates[0]
    cache, name = _cache(device), f"{name} of {list(candidates)}"
    found = _read(cache).get(name)
    if isinstance(found, int) and found < len(candidates):
        return candidates[found]
    times = [_milliseconds(run, candidate) for candidate in candidates]
    best = times.index(min(times))
    _remember(cache, name, best)
    return candidates[best]


class Tuned(Generic[T]):
    """The candidate that a kernel runs in, for each of the sizes that its user tells apart.

    What a graph under capture gets decides nothing: it is the first candidate, unmeasured.
    """

    def __init__(self, name: str, candidates: Sequence[T]) -> None:
        self._name, self._candidates = name, candidates
        self._known: dict[int | None, T] = {}

    def choose(self, entries: int, run: Callable[[T], None], device: torch.device, below: int | None = None) -> T:
        """The first for fewer entries than ``LARGE_ENOUGH``, else the ``fastest``, measured once.

        Args:
            below: the power of two that stands for a size, where sizes are tuned apart.
        """
        if entries < LARGE_ENOUGH:
            return self._candidates[0]
        found = self._known.get(below)
        if found is None:
            name = self._name if below is None else f"{self._name} below 2^{below}"
            found = fastest(name, self._candidates, run, device)
            if tunes(device):
                self._known[below] = found
        return found


def tunes(device: torch.device) -> bool:
    """Whether candidates are measured on this device."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0" and not torch.cuda.is_current_stream_capturing()


def _milliseconds(run: Callable[[T], None], candidate: T) -> float:
    run(candidate)  # compiles
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(_LAUNCHES):
        start.record()
        run(candidate)
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best


@lru_cache(maxsize=8)
def _cache(device: torch.device) -> Path:
    import triton

    folder = os.environ.get(FOLDER) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "megatron_lowprec")
    gpu = torch.cuda.get_device_name(device).replace(" ", "-")
    return Path(folder, f"tilings-{gpu}-triton-{triton.__version__}.json").expanduser()


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: both mend themselves by measuring
        return {}
    return found if isinstance(found, dict) else {}


def _remember(path: Path, name: str, best: int) -> None:
    """Write into the cache atomically: other ranks write the same file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(_read(path) | {name: best}, indent=1))
    except OSError:  # a home that cannot be written costs a measurement at each start, and nothing else
        return
