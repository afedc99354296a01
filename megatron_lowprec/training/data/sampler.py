"""Order of samples: a function of seed and position, independent of a run's length.

Megatron-core's GPTDataset shuffles all epochs that a run will need together, so that one more epoch changes the order
from the first sample on. Here a dataset is always one epoch, and each epoch has its own permutation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from megatron.core.datasets import helpers_cpp


class Samples(Protocol):
    """One epoch of samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Epochs:
    """An endless dataset: epoch e is a permutation seeded by (seed, e)."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self.samples = samples
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def index(self, position: int) -> int:
        """Index of the dataset's sample at ``position`` of the endless order."""
        epoch, place = divmod(position, len(self.samples))
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(len(self.samples))
        return int(self._permutation[place])

    def __getitem__(self, position: int) -> Any:
        return self.samples[self.index(position)]


class Blend:
    """Endless datasets, mixed so that after any number of samples each has its share, rounded.

    The next sample comes from the dataset that is furthest behind its weight (Megatron-core's own rule and code), so
    that a longer run has the same beginning as a shorter one.
    """

    def __init__(self, parts: Sequence[Epochs], weights: Sequence[float], starts: Sequence[int] | None = None) -> None:
        """``starts``: first position in each dataset's own order; 0 by default."""
        self._parts = list(parts)
        self._starts = list(starts) if starts is not None else [0] * len(self._parts)
        self._weights = np.asarray(weights, dtype=np.float64) / sum(weights)
        self._part = np.empty(0, dtype=np.int16)
        self._place = np.empty(0, dtype=np.int64)

    def locate(self, position: int) -> tuple[int, int]:
        """(dataset, position within it) of a position of the blend."""
        if len(self._parts) == 1:
            return 0, self._starts[0] + position
        self._reach(position)
        part = int(self._part[position])
        return part, self._starts[part] + int(self._place[position])

    def taken(self, count: int) -> list[int]:
        """Number of samples from each dataset among the first ``count``."""
        if len(self._parts) == 1 or count == 0:
            return [count] + [0] * (len(self._parts) - 1)
        self._reach(count - 1)
        found: list[int] = np.bincount(self._part[:count], minlength=len(self._parts)).tolist()
        return found

    def _reach(self, position: int) -> None:
        if position >= len(self._part):
            size = max(1024, 1 << int(position + 1).bit_length())
            self._part, self._place = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
            helpers_cpp.build_blending_indices(self._part, self._place, self._weights, len(self._parts), size, False)

    def __getitem__(self, position: int) -> Any:
        part, place = self.locate(position)
        return self._parts[part][place]


class Phases:
    """One blend before a given sample, another from it on."""

    def __init__(self, first: Blend, second: Blend, switch: int) -> None:
        self._first, self._second, self._switch = first, second, switch

    def __getitem__(self, position: int) -> Any:
        return self._first[position] if position < self._switch else self._second[position - self._switch]


class Positions:
    """Endless positions of one rank's microbatches, distributed as in Megatron.

    From ``start`` on, each run of micro-batch x data-parallel size positions is one microbatch, split in rank order.
    """

    def __init__(self, start: int, micro_batch: int, rank: int, size: int) -> None:
        self._start, self._micro_batch, self._rank, self._size = start, micro_batch, rank, size

    def __iter__(self) -> Iterator[list[int]]:
        first = self._start + self._rank * self._micro_batch
        while True:
            yield list(range(first, first + self._micro_batch))
            first += self._micro_batch * self._size
