"""Gradient reduction over data-parallel ranks in FP8 (FP8-LM, arXiv 2310.18313, "FP8 gradient and all-reduce").

Each rank sends every other rank its shard of each tensor as FP8 codes, 1 byte an entry instead of 4 in fp32. It adds
the received codes in rank order, so the result does not depend on the network. Each tensor has one power-of-two scale,
from the amax over all ranks. The sum is fp32, or each partial sum is rounded to FP8, as an in-network reduction would.
Rounded sums lose addends below half a step of the partial sum, and can saturate even if no rank's values do.

Gradients may be multiplied by a factor mu before the cast, which adapts to the number of saturated codes. As in the
source, they are counted in the codes that each rank casts, before the sum, over all tensors and ranks of a step. The
source does not specify how mu grows: here by a constant ratio each step, from 1/2 to 2 in 1000 steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.dispatch import (
    cast_gradient_,
    count_saturated,
    gradient_scale,
    multi_tensor_cast_,
    requantize_,
    sum_codes_,
)
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.gradient_codes.reference import Bounds, parts_between
from megatron_lowprec.recipe.recipe import GradientSpec

_MOST_SATURATED = 1e-5
_LOWEST, _HIGHEST = 0.5, 2.0
_RISE = (_HIGHEST / _LOWEST) ** (1 / 1000)

MOST_RANKS_OF_ROUNDED_SUMS = 8
"""Over more ranks, sums rounded to E4M3 lose more than a tenth of the mean gradient (docs/recipes/fp8_lm.md)."""


def rounded_sum_warnings(spec: GradientSpec, ranks: int) -> list[str]:
    """Log lines: a warning if ``spec`` rounds sums over more than ``MOST_RANKS_OF_ROUNDED_SUMS`` ranks; else none."""
    if spec.sum != "format" or not spec.quantized or ranks <= MOST_RANKS_OF_ROUNDED_SUMS:
        return []
    return [
        f"warning: gradients.sum=format rounds partial sums over {ranks} data-parallel ranks to {spec.format.upper()}, "
        f"which loses small addends above {MOST_RANKS_OF_ROUNDED_SUMS} ranks: gradients.sum=fp32 sends as many bytes"
    ]


class GradientFactor:
    """Factor mu of gradients before the cast, and the share of saturated codes; on the device.

    Args:
        device: of the gradients.
        automatic: adapt mu after each step; else it stays 1.

    Attributes:
        mu: fp32 [1].
        saturated: share of the codes of the last finished step that lay at the format's maximum: float64 [].
    """

    def __init__(self, device: torch.device, automatic: bool) -> None:
        self.automatic = automatic
        self.mu = torch.ones(1, device=device)
        self.saturated = torch.zeros((), dtype=torch.float64, device=device)
        self.forget()

    def count(self, saturated: torch.Tensor, entries: int) -> None:
        """Add a buffer to the counts of this step: ``saturated`` (int64 scalar) of ``entries`` codes."""
        self._saturated.append(saturated)
        self._entries += entries

    def forget(self) -> None:
        """Reset the counts, after a pass that is not a step."""
        self._saturated: list[torch.Tensor] = []
        self._entries = 0

    def end_step(self) -> None:
        """Set mu for the next step, after a weight update; collective over all ranks."""
        counts = torch.full((2,), self._entries, dtype=torch.float64, device=self.mu.device)
        counts[0] = torch.stack(self._saturated).sum() if self._saturated else 0
        dist.all_reduce(counts)
        self.saturated = counts[0] / counts[1].clamp(min=1)
        if self.automatic:
            too_many = self.saturated > _MOST_SATURATED
            # in place: CUDA graphs read it at its address
            self.mu.copy_(torch.where(too_many, _LOWEST, (self.mu * _RISE).clamp(max=_HIGHEST)))
        self.forget()


class GradientSum:
    """Reduction of gradients over data-parallel ranks in FP8.

    Args:
        spec: formats of the codes and of their sum.
        factor: mu, and the counts of saturated codes.

    Attributes:
        rounds_sums: whether each partial sum is rounded to the format.
    """

    def __init__(self, spec: GradientSpec, factor: GradientFactor) -> None:
        self._format, self._factor = FORMATS[spec.format], factor
        self.rounds_sums = spec.sum == "format"

    @torch.no_grad()
    def reduce_scatter_(
        self,
        flat: torch.Tensor,
        tensors: Sequence[Bounds],
        times: float,
        group: dist.ProcessGroup,
        sharers: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """Write ``times`` the sum over ``group`` to this rank's shard of ``flat``; the rest is undefined afterwards.

        A tensor with a non-finite entry on any rank becomes NaN as a whole.

        Args:
            flat: fp32 or bf16 [ranks * n], with equal tensor bounds on all ranks; shard i of n entries is rank i's.
            tensors: bounds of the tensors, ascending.
            times: factor of the sum; 1 / ranks for a mean.
            sharers: further groups of ranks that hold other shards of these tensors and share their scales.
        """
        amax = torch.stack(torch._foreach_norm([flat[start:end] for start, end in tensors], torch.inf)).float()
        scale = self.encode_scale(max_over(amax, group, *sharers))
        codes = self._codes(flat, tensors, scale)
        self.count(codes, tensors)
        received = self.exchange(codes, group)
        part = received.shape[1]
        first = group.rank() * part
        own = flat[first:][:part]
        own.zero_()
        total = own if own.dtype == torch.float32 else torch.zeros(part, device=own.device)
        self.sum_codes_(received, parts_between(tensors, first, first + part), times / scale, total)
        if total is not own:
            own.copy_(total)

    def encode_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """Encode scales, mu included, of the shape of ``amax``; NaN where that is not finite."""
        return gradient_scale(amax, self._format, self._factor.mu)

    def _codes(self, flat: torch.Tensor, tensors: Sequence[Bounds], scale: torch.Tensor) -> torch.Tensor:
        """FP8 codes, uint8, of the shape of ``flat``; zeros between tensors."""
        codes = torch.zeros(flat.numel(), dtype=torch.uint8, device=flat.device)
        parts = [(flat[start:end], codes[start:end]) for start, end in tensors]
        if flat.dtype == torch.float32:
            values, places = zip(*parts, strict=True)
            multi_tensor_cast_(values, scale, self._format, places)
        else:  # one tensor at a time: fp32 copies of all might not fit in memory
            for (value, place), one in zip(parts, scale.split(1), strict=True):
                multi_tensor_cast_([value.float()], one, self._format, [place])
        return codes

    def cast_(self, values: torch.Tensor, codes: torch.Tensor, amax: torch.Tensor) -> None:
        """Write the codes, uint8, and the amax, fp32 [1], of fp32 ``values`` by the scale of their own amax."""
        cast_gradient_(values, codes, amax, self._factor.mu, self._format)

    def count(self, codes: torch.Tensor, tensors: Sequence[Bounds]) -> None:
        """Count the saturated codes of a buffer, before they are summed."""
        self._factor.count(count_saturated(codes, self._format), sum(end - start for start, end in tensors))

    def requantize_(self, codes: torch.Tensor, tensors: Sequence[Bounds], ratio: torch.Tensor) -> None:
        """Multiply the values of each tensor's codes by its entry of ``ratio``, powers of two up to 1, and round.

        Exact but for the format's subnormals.
        """
        requantize_(codes, tensors, ratio, self._format)

    @staticmethod
    def exchange(codes: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """All ranks' codes of this rank's shard: uint8 [ranks, n] of codes [ranks * n]."""
        if group.size() == 1:
            return codes.view(1, -1)
        received = torch.empty_like(codes)
        dist.all_to_all_single(received, codes, group=group)
        return received.view(group.size(), -1)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Codes, uint8, of fp32 values that are on the format's grid."""
        return values.to(DTYPES[self._format.name]).view(torch.uint8)

    def sum_codes_(
        self, received: torch.Tensor, tensors: Sequence[Bounds], factor: torch.Tensor, total: torch.Tensor
    ) -> None:
        """Write ``factor``, fp32 [tensors], times the sum of the codes, uint8 [ranks, n], in rank order: fp32 [n]."""
        sum_codes_(received, tensors, factor, self._format, self.rounds_sums, total)
