"""Row chunks that fit in a CPU core's cache during a chain of elementwise operations."""

from collections.abc import Iterator

import torch

_CPU_CHUNK_ELEMENTS = 1 << 17  # 512 KB of fp32: larger leaves the L2 cache, smaller waits for Python (gpt_tiny)


def row_chunks(
    rows: int, columns: int, device: torch.device, multiple_of: int = 1, elements: int | None = None
) -> Iterator[slice]:
    """Slices that cover ``rows``; all but the last have a multiple of ``multiple_of`` rows.

    Args:
        elements: approximate entries of a slice. None fits the cache on a CPU, and gives one slice on a GPU.
    """
    step = rows
    if elements is None and device.type == "cpu":
        elements = _CPU_CHUNK_ELEMENTS
    if elements is not None:
        step = max(1, elements // max(1, columns * multiple_of)) * multiple_of
    for start in range(0, rows, max(1, step)):
        yield slice(start, min(start + step, rows))
