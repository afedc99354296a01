"""One rank of ``exchange``. Takes one argument, JSON with tensors (entries of each), calls and result (a file)."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowprec.comm.gradient_codes import GradientCodes
from megatron_lowprec.comm.gradients import GradientFactor, GradientSum
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.training.distributed.startup import prepare_environment
from megatron_lowprec.training.distributed.visible_gpus import has_gpus
from tools.bench.measure import distance

BUCKET = 40_000_000  # Megatron-core's
MOST_DISTANCE = 2**-4  # half a step of E4M3, relative
Part = Callable[[], object]


class Buckets:
    """A rank's fp32 gradients, in buckets whose sizes are multiples of the number of ranks.

    Args:
        tensors: entries of each.
        device: of the gradients.
    """

    def __init__(self, tensors: Sequence[int], device: torch.device) -> None:
        self.ranks, self.rank, self.device = dist.get_world_size(), dist.get_rank(), device
        self.bounds: list[list[tuple[int, int]]] = [[]]
        for entries in tensors:
            if self.bounds[-1] and self.bounds[-1][-1][1] >= BUCKET:
                self.bounds.append([])
            start = self.bounds[-1][-1][1] if self.bounds[-1] else 0
            self.bounds[-1].append((start, start + entries))
        self.sizes = [-(-bounds[-1][1] // (16 * self.ranks)) * 16 * self.ranks for bounds in self.bounds]
        draws = torch.Generator(device).manual_seed(1234 + self.rank)
        self.gradients = [torch.randn(size, generator=draws, device=device) for size in self.sizes]

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a bucket."""
        part = flat.numel() // self.ranks
        return flat[self.rank * part :][:part]

    def sent(self, entry: int) -> int:
        """Bytes that a rank sends to others, of ``entry`` bytes each."""
        return sum(self.sizes) * entry * (self.ranks - 1) // self.ranks


def main(asked: dict[str, Any]) -> None:
    """Measure each exchange, write the rows."""
    local = prepare_environment().local_rank
    on_gpu = has_gpus()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    buckets = Buckets(asked["tensors"], device)
    exact = [flat.clone() for flat in buckets.gradients]
    for flat in exact:
        dist.reduce_scatter_tensor(buckets.own(flat), flat)
    rows: list[dict[str, Any]] = []
    for name, make, entry in (
        ("fp32 reduce-scatter", _reduce_scatter(torch.float32), 4),
        ("bf16 reduce-scatter", _reduce_scatter(torch.bfloat16), 2),
        ("FP8 codes, all-to-all alone", _all_to_all, 1),
        ("fp8_lm, from an fp32 buffer", _from_buffer, 1),
        ("fp8_lm_o2, stored in FP8", _stored, 1),
    ):
        parts, result = make(buckets)
        for part in parts.values():
            part()
        far = None
        if result is not None:
            sums, exacts = result(), [buckets.own(flat) for flat in exact]
            far = max(distance(found, right) for found, right in zip(sums, exacts, strict=True))
            if far > MOST_DISTANCE:
                sys.exit(f"{name}: relative distance {far} from the sum in fp32")
        taken = _measured(parts, asked["calls"], on_gpu)
        rows += [
            {"exchange": name, "part": part, "distance": far, "sent": buckets.sent(entry) if part == "exchange" else 0}
            | spread
            for part, spread in taken.items()
        ]
    if dist.get_rank() == 0:
        Path(asked["result"]).write_text(json.dumps({"rows": rows, "buckets": buckets.sizes}), encoding="utf-8")
    dist.destroy_process_group()


Made = tuple[Mapping[str, Part], Callable[[], list[torch.Tensor]] | None]
"""Parts of an exchange in their order, and this rank's sums afterwards."""


def _reduce_scatter(dtype: torch.dtype) -> Callable[[Buckets], Made]:
    def make(buckets: Buckets) -> Made:
        flats = [flat.to(dtype, copy=True) for flat in buckets.gradients]

        def exchange() -> None:
            for flat in flats:
                dist.reduce_scatter_tensor(buckets.own(flat), flat)

        return {"exchange": exchange}, lambda: [buckets.own(flat) for flat in flats]

    return make


def _all_to_all(buckets: Buckets) -> Made:
    codes = [torch.zeros(size, dtype=torch.uint8, device=buckets.device) for size in buckets.sizes]

    def exchange() -> None:
        for flat in codes:
            GradientSum.exchange(flat, _all_ranks())

    return {"exchange": exchange}, None


def _from_buffer(buckets: Buckets) -> Made:
    reduction, flats = _reduction("fp8_lm", buckets), [flat.clone() for flat in buckets.gradients]

    def exchange() -> None:
        for flat, bounds in zip(flats, buckets.bounds, strict=True):
            reduction.reduce_scatter_(flat, bounds, 1.0, _all_ranks())

    return {"exchange": exchange}, lambda: [buckets.own(flat) for flat in flats]


def _stored(buckets: Buckets) -> Made:
    reduction = _reduction("fp8_lm_o2", buckets)
    stored = [
        GradientCodes(size, bounds, reduction, buckets.device)
        for size, bounds in zip(buckets.sizes, buckets.bounds, strict=True)
    ]

    def cast() -> None:
        for codes, flat in zip(stored, buckets.gradients, strict=True):
            codes.reset()
            for index, (start, end) in enumerate(codes.tensors):
                codes.cast(index, flat[start:end])

    def exchange() -> None:
        for codes in stored:
            codes.reduce(1.0, _all_ranks())

    def decode() -> None:
        for codes in stored:
            codes.parts()

    def sums() -> list[torch.Tensor]:
        return [
            codes.parts()(0, start, start + size // buckets.ranks)
            for codes, size, start in zip(
                stored, buckets.sizes, [buckets.rank * size // buckets.ranks for size in buckets.sizes], strict=True
            )
        ]

    return {"cast, in the backward pass": cast, "exchange": exchange, "sum, before the update": decode}, sums


def _reduction(recipe: str, buckets: Buckets) -> GradientSum:
    return GradientSum(get_recipe(recipe).gradients, GradientFactor(buckets.device, automatic=False))


def _all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _measured(parts: Mapping[str, Part], calls: int, on_gpu: bool) -> dict[str, dict[str, float]]:
    """Median and quantiles of each part's milliseconds: on a GPU between events in the stream, else by the clock."""
    samples: dict[str, list[float]] = {name: [] for name in parts}
    marks = []
    for _ in range(calls):
        for part in parts.values():
            marks.append(_mark(on_gpu))
            part()
            marks.append(_mark(on_gpu))
    if on_gpu:
        torch.cuda.synchronize()
    for index in range(0, len(marks), 2):
        start, end = marks[index], marks[index + 1]
        name = list(parts)[index // 2 % len(parts)]
        samples[name].append(start.elapsed_time(end) if on_gpu else (end - start) * 1e3)
    return {
        name: dict(zip(("low", "ms", "high"), _three(quantiles(taken, n=10, method="inclusive")), strict=True))
        for name, taken in samples.items()
    }


def _three(tenths: Sequence[float]) -> tuple[float, float, float]:
    return tenths[1], tenths[4], tenths[7]


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
