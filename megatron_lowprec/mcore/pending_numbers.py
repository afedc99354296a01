"""Numbers on their way from the device to the host."""

from __future__ import annotations

import torch


class PendingNumbers:
    """Numbers being copied from the device: reading them waits for the work that computed them, not for later launches.

    Args:
        numbers: any dtype and device, one dimension.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._copied = torch.cuda.Event() if numbers.is_cuda else None
        self._numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[float]:
        """The numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[float] = self._numbers.tolist()
        return found
