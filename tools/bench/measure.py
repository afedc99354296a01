"""Timing: medians of repeated calls with the L2 cache flushed, variants in turn, device copies as a yardstick.

On a GPU, times are CUDA events around a call (``triton.testing.do_bench``). If the host is slower than the GPU, they
include the gaps between launches; ``host_microseconds`` and ``graph`` separate the two. On a CPU all times are wall
clock, only good for testing this tool.
"""

import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from importlib.util import find_spec
from itertools import cycle
from statistics import median
from typing import Any, ParamSpec, TypeVar

import torch

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
P = ParamSpec("P")
Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, 20th and 80th percentile; ``rounds`` are the medians it combines."""

    ms: float
    low: float
    high: float
    rounds: tuple[float, ...] = ()

    def row(self) -> dict[str, Any]:
        """Columns of a row."""
        return asdict(self) | {"noise": self.noise}

    @property
    def noise(self) -> float:
        """Largest distance between rounds, as a share of the median."""
        return (max(self.rounds) - min(self.rounds)) / self.ms if self.rounds else 0.0


class Bench:
    """Measures calls on one device.

    Args:
        device: where the calls run.
        rep_ms: how long one measurement repeats the call.
    """

    def __init__(self, device: torch.device, rep_ms: float = 100.0) -> None:
        self.device, self.rep_ms = device, rep_ms
        self.on_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def time(self, call: Call) -> Timing:
        """One measurement."""
        if not self.on_gpu:
            (ms,) = self.wall_milliseconds(call, 1)
            return Timing(ms, ms, ms, (ms,))
        from triton.testing import do_bench

        # At least ten calls, however long.
        rep = max(self.rep_ms, 10 * self.wall_milliseconds(call, 1)[0])
        ms, low, high = do_bench(call, warmup=25, rep=rep, quantiles=[0.5, 0.2, 0.8])
        return Timing(ms, low, high, (ms,))

    def wall_milliseconds(self, call: Call, calls: int, warm_up: int = 1, wait: bool = True) -> list[float]:
        """Wall-clock time of each call on an idle device, until the device is idle again, or without ``wait`` until
        the call returns; after ``warm_up`` calls, which may compile.
        """
        samples = []
        for _ in range(warm_up + calls):
            self.synchronize()
            started = time.perf_counter()
            call()
            if wait:
                self.synchronize()
            samples.append((time.perf_counter() - started) * 1e3)
        return samples[warm_up:]

    def compare(self, calls: Mapping[K, Call], rounds: int) -> dict[K, Timing]:
        """Times of several variants, measured in turn ``rounds`` times, so that clock drift affects all alike.

        Prints each on stderr, since the tables follow at the end of all.
        """
        taken: dict[K, list[Timing]] = {name: [] for name in calls}
        for turn in range(rounds):
            for name, call in calls.items():
                taken[name].append(self.time(call))
                print(f"{name}, round {turn + 1}: {taken[name][-1].ms:.3f} ms", file=sys.stderr, flush=True)
        return {name: combined(timings) for name, timings in taken.items()}

    def host_microseconds(self, call: Call) -> float:
        """Median time until a call returns on an idle device: Python and launches, without execution."""
        calls, warm_up = (1, 0)
        if self.on_gpu:  # within a second, if calls are long
            calls, warm_up = max(5, min(100, int(1e3 / self.wall_milliseconds(call, 1)[0]))), 2
        return median(self.wall_milliseconds(call, calls, warm_up, wait=False)) * 1e3

    def graph(self, call: Call) -> Timing | str:
        """Time of the call's kernels alone, as a CUDA graph, or the reason why it cannot be captured."""
        captured = self.captured(call)
        return captured if isinstance(captured, str) else self.time(captured)

    def captured(self, call: Call) -> Call | str:
        """The call as the replay of a CUDA graph, or the reason why it cannot be captured."""
        if not self.on_gpu:
            return "no CUDA graphs on a CPU"
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                call()
        except errors() as error:
            self.synchronize()
            return one_line(error)
        return graph.replay

    def copy_call(self, tensor_bytes: int) -> Call:
        """A plain device copy of a tensor of that size."""
        source = torch.randint(-128, 128, (tensor_bytes,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def copy(self, tensor_bytes: int) -> "Copy":
        """That copy, timed."""
        return Copy(2 * tensor_bytes, self.time(self.copy_call(tensor_bytes)).ms)

    def input_sets(self, make: Callable[[], T], tensor_bytes: int) -> list[T]:
        """One set of inputs, or several if one would stay in the L2 cache between calls."""
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.on_gpu else 0
        return [make() for _ in range(max(1, min(8, -(-2 * cache // max(1, tensor_bytes)))))]


@dataclass(frozen=True)
class Copy:
    """A measured copy: bytes read and written, milliseconds."""

    moved_bytes: int
    ms: float

    @property
    def terabytes_per_second(self) -> float:
        """10^12 bytes a second, read and written."""
        return rate(self.moved_bytes, self.ms)

    def row(self) -> dict[str, float]:
        """For the JSON file."""
        return {"moved_bytes": self.moved_bytes, "ms": self.ms, "tb_s": self.terabytes_per_second}


def rate(moved_bytes: int, ms: float) -> float:
    """TB/s."""
    return moved_bytes / ms / 1e9


def combined(timings: Sequence[Timing]) -> Timing:
    """Rounds of one measurement as one: the median of medians, the widest spread."""
    medians = tuple(timing.ms for timing in timings)
    return Timing(median(medians), min(t.low for t in timings), max(t.high for t in timings), medians)


def cycle_inputs(sets: Sequence[T], call: Callable[[T], object]) -> Call:
    """A call that uses the next set of inputs each time."""
    following = cycle(sets)
    return lambda: call(next(following))


def errors() -> tuple[type[Exception], ...]:
    """Errors of a kernel that does not run here; its row reports them, and the others are still measured."""
    found: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, AssertionError)
    if find_spec("triton") is not None:
        from triton.errors import TritonError

        found = (*found, TritonError)
    return found


def one_line(error: Exception) -> str:
    """The beginning of an error message, for a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def errors_as_faults(check: Callable[P, str | None]) -> Callable[P, str | None]:
    """A check that returns a kernel's error like any other difference from the reference."""

    @wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> str | None:
        try:
            return check(*args, **kwargs)
        except errors() as error:
            return one_line(error)

    return checked


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Distance relative to ``exact`` in the 2-norm."""
    exact = exact.detach().double()
    return float((found.detach().to(exact) - exact).norm() / exact.norm())
