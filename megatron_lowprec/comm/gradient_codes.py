"""Gradients of many tensors stored in FP8: a byte an entry and one scale a tensor (FP8-LM, arXiv 2310.18313).

Each rank casts a tensor's gradient by the tensor's own scale as soon as it is complete. The reduction gives all ranks
the least of their scales and requantizes the codes, as the source does. Scales are powers of two, so only codes that
become subnormal are rounded again. The received codes take the place of the sent ones. They are summed in fp32 when
the optimizer reads them, so the sum is never rounded unless the recipe asks for rounded sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_lowprec.comm.gradients import GradientSum
from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.kernels.gradient_codes.reference import Bounds, parts_between


class GradientCodes:
    """FP8 gradients of the tensors of a flat buffer.

    A tensor is empty, or holds this rank's gradient, or, after ``reduce``, its part of the sum over ranks.

    Args:
        numel: entries of the buffer, a multiple of the number of ranks.
        tensors: bounds of the tensors, ascending, equal on all ranks.
        reduction: formats, scales and sums.
        device: of the gradients.

    Attributes:
        codes: uint8 [numel].
        amax: fp32 [len(tensors)], largest magnitude of each tensor; 0 if it is empty.
        tensors: bounds of the tensors.
    """

    def __init__(self, numel: int, tensors: Sequence[Bounds], reduction: GradientSum, device: torch.device) -> None:
        self.codes = torch.zeros(numel, dtype=torch.uint8, device=device)
        self.amax = torch.zeros(len(tensors), device=device)
        self.tensors = list(tensors)
        self._reduction = reduction
        self._filled = [False] * len(tensors)
        self._decode_scale: torch.Tensor | None = None  # fp32 [tensors], after the reduction
        self._received = self.codes.view(1, -1)
        self._first = 0  # entry of the buffer at which this rank's part begins
        self._holds_received = False  # which lie over the tensors and what is between them

    @property
    def reduced(self) -> bool:
        """Whether the codes are the sum over ranks."""
        return self._decode_scale is not None

    def reset(self) -> None:
        """Empty all tensors, at the beginning of a step."""
        if self._holds_received:
            self.codes.zero_()
            self._holds_received = False
        self.amax.zero_()
        self._filled = [False] * len(self.tensors)
        self._decode_scale = None

    @torch.no_grad()
    def cast(self, index: int, values: torch.Tensor) -> None:
        """Replace a tensor's gradient by the codes of ``values``, fp32, by the tensor's own scale."""
        start, end = self.tensors[index]
        self._reduction.cast_(values.reshape(-1), self.codes[start:end], self.amax[index : index + 1])
        self.fill(index)

    def fill(self, index: int) -> None:
        """State that a tensor holds this rank's gradient, as after a replayed ``cast``."""
        self._filled[index] = True

    def is_filled(self, index: int) -> bool:
        """Whether a tensor holds this rank's gradient."""
        return self._filled[index]

    @torch.no_grad()
    def local(self, index: int) -> torch.Tensor:
        """This rank's gradient of a tensor, before the reduction: fp32 [entries]; zeros if it is empty."""
        start, end = self.tensors[index]
        if not self._filled[index]:
            return torch.zeros(end - start, device=self.codes.device)
        return self._sum(self.codes[start:end].view(1, -1)) / self._scale()[index]

    @torch.no_grad()
    def reduce(self, times: float, group: dist.ProcessGroup, sharers: Sequence[dist.ProcessGroup] = ()) -> None:
        """Replace the codes by those of all ranks' gradients in this rank's part; arguments as ``reduce_scatter_``.

        A tensor with a non-finite entry on any rank becomes NaN as a whole. With rounded sums the codes are the sum's,
        in the first part of the buffer.
        """
        for (start, end), filled in zip(self.tensors, self._filled, strict=True):
            if not filled:  # it may have the codes of an earlier step
                self.codes[start:end].zero_()
        self._reduction.count(self.codes, self.tensors)
        scale = self._reduction.encode_scale(max_over(self.amax, group, *sharers))
        if group.size() > 1 or sharers:
            self._reduction.requantize_(self.codes, self.tensors, scale / self._scale())
        received = self._reduction.exchange(self.codes, group)
        if group.size() > 1 and self._reduction.rounds_sums:
            received = self._reduction.encode(self._sum(received)).view(1, -1)
        self._received = self.codes[: received.numel()].view(received.shape)
        if group.size() > 1:
            self._received.copy_(received)
            self._holds_received = True
        self._first = group.rank() * (self.codes.numel() // group.size())
        self._decode_scale = times / scale

    @torch.no_grad()
    def part(self, index: int, start: int, end: int) -> torch.Tensor:
        """Entries ``start`` to ``end`` of a tensor's reduced gradient, all in this rank's part: fp32 [entries]."""
        first = self.tensors[index][0]
        return self._between([(first + start, first + end)], first + start, first + end, slice(index, index + 1))

    @torch.no_grad()
    def parts(self) -> Callable[[int, int, int], torch.Tensor]:
        """As ``part``, of all tensors: decodes this rank's part at once, fp32, and returns views of it."""
        end = self._first + self._received.shape[1]
        values = self._between(self.tensors, self._first, end, slice(None))

        def part(index: int, start: int, end: int) -> torch.Tensor:
            first = self.tensors[index][0] - self._first
            return values[first + start : first + end]

        return part

    def _sum(self, received: torch.Tensor) -> torch.Tensor:
        """Sum of codes, uint8 [ranks, n], in rank order: fp32 [n]."""
        total = torch.empty(received.shape[1:], device=received.device)
        self._reduction.sum_codes_(received, [(0, total.numel())], torch.ones(1, device=total.device), total)
        return total

    def _between(self, tensors: Sequence[Bounds], first: int, end: int, rows: slice) -> torch.Tensor:
        """Reduced gradients in entries ``first`` to ``end`` of the buffer, fp32; undefined between tensors."""
        assert self._decode_scale is not None
        values = torch.empty(end - first, device=self.codes.device)
        received = self._received[:, first - self._first : end - self._first]
        self._reduction.sum_codes_(received, parts_between(tensors, first, end), self._decode_scale[rows], values)
        return values

    def is_finite(self, index: int) -> bool:
        """Whether a tensor's reduced gradient is finite on all ranks; synchronizes with the device."""
        assert self._decode_scale is not None
        return bool(self._decode_scale[index].isfinite())

    def scale_(self, factor: float | torch.Tensor) -> None:
        """Multiply the reduced gradients by ``factor``."""
        assert self._decode_scale is not None
        self._decode_scale = self._decode_scale * factor

    def _scale(self) -> torch.Tensor:
        """This rank's own encode scales, fp32 [tensors]."""
        return self._reduction.encode_scale(self.amax)
