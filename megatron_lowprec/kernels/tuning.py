"""Autotuning of a kernel's tilings: measured once on a machine, cached on disk.

A tiling changes a kernel's speed but no bits of an operand, so ranks may choose differently. Kernels that sum are not
tuned, since a tiling could change a sum's last bits; except those whose every tiling adds in the order of k, as in
``grouped_gemm``. The cost is bounded: a few candidates of twenty launches each, on the first operand that is large
enough to distinguish them, or on the first of each size class.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import torch

from megatron_lowprec.files import atomic_write, read_json

SWITCH = "MEGATRON_LOWPREC_TUNE"
FOLDER = "MEGATRON_LOWPREC_CACHE"
_LAUNCHES = 20
LARGE_ENOUGH = 1 << 24
"""Least entries of an operand that distinguishes tilings."""

T = TypeVar("T")


def fastest(name: str, candidates: Sequence[T], run: Callable[[T], None], device: torch.device) -> T:
    """The candidate with the shortest ``run`` on ``device``, from the cache if present.

    ``candidates[0]``, unmeasured, with ``MEGATRON_LOWPREC_TUNE=0``, without a GPU, or under graph capture.

    Args:
        name: the kernel with its constants. The candidates, the GPU's name and Triton's version complete the cache key.

    Raises:
        RuntimeError: no candidate fits the GPU's shared memory and registers.
    """
    if len(candidates) == 1 or not tunes(device):
        return candidates[0]
    cache, name = _cache(device), f"{name} of {list(candidates)}"
    found = _read(cache).get(name)
    if found is not None and 0 <= found < len(candidates):
        return candidates[found]
    times = [_milliseconds(run, candidate) for candidate in candidates]
    best = times.index(min(times))
    if math.isinf(times[best]):
        raise RuntimeError(f"{name}: none fits {device}")
    _remember(cache, name, best)
    return candidates[best]


class Tuned(Generic[T]):
    """The tuned candidate of a kernel, for each size class.

    Graph capture gets the first candidate, unmeasured, and stores no choice.
    """

    def __init__(self, name: str, candidates: Sequence[T]) -> None:
        self._name, self._candidates = name, candidates
        self._known: dict[int | None, T] = {}

    def known(self, entries: int, below: int | None = None) -> T | None:
        """The candidate of ``choose`` if that measures nothing and the answer will not change."""
        if entries < LARGE_ENOUGH or os.environ.get(SWITCH, "1") == "0":
            return self._candidates[0]
        return self._known.get(below)

    def choose(self, entries: int, run: Callable[[T], None], device: torch.device, below: int | None = None) -> T:
        """The first candidate below ``LARGE_ENOUGH`` entries, else the ``fastest``, measured once.

        Args:
            below: size class of fewer than 2^below entries, tuned separately; None for one class.
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
    """The shortest of the launches; infinite if the candidate needs more shared memory than the GPU has."""
    try:
        run(candidate)  # compiles
    except Exception as error:
        if not _exceeds_the_gpu(error):
            raise
        return math.inf
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = math.inf
    for _ in range(_LAUNCHES):
        start.record()
        run(candidate)
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best


def _exceeds_the_gpu(error: Exception) -> bool:
    from triton.runtime.errors import OutOfResources

    return isinstance(error, OutOfResources)


@lru_cache(maxsize=8)
def _cache(device: torch.device) -> Path:
    import triton

    folder = os.environ.get(FOLDER) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "megatron_lowprec")
    gpu = torch.cuda.get_device_name(device).replace(" ", "-")
    return Path(folder, f"tilings-{gpu}-triton-{triton.__version__}.json").expanduser()


def _read(path: Path) -> dict[str, int]:
    try:
        found = read_json(path, "")
    except (OSError, ValueError):  # absent or damaged: the next measurement rewrites it
        return {}
    return {name: best for name, best in found.items() if type(best) is int}


def _remember(path: Path, name: str, best: int) -> None:
    """Write to the cache atomically, since other ranks write the same file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(_read(path) | {name: best}, indent=1))
    except OSError:  # without a writable home each start measures
        return
