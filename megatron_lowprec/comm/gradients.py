"""Gradient reduction over data-parallel ranks in FP8 (FP8-LM, arXiv 2310.18313, "FP8 gradient and all-reduce").

Each rank sends every other rank its shard of each tensor as FP8 codes, 1 byte an entry instead of 4 in fp32. It adds
the received codes in rank order, so the result does not depend on the network. Each tensor has one power-of-two scale,
from the amax over all ranks. The sum is fp32, or each partial sum is rounded to FP8, as an in-network reduction would.
Rounded sums lose addends below half a step of the partial sum, and can saturate even if no rank's values do. Gradients
are therefore multiplied by a factor mu before the cast, which adapts to the number of saturated sums.

The source does not specify where saturation is counted and how mu grows. Here it is counted in the sums, over all
tensors and ranks of a step; mu grows by a constant ratio each step, from 1/2 to 2 in 1000 steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.dispatch import multi_tensor_cast_
from megatron_lowprec.kernels.multi_tensor_cast.reference import DTYPES
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale
from megatron_lowprec.recipe.schema import GradientSpec

_MOST_SATURATED = 1e-5
_LOWEST, _HIGHEST = 0.5, 2.0
_RISE = (_HIGHEST / _LOWEST) ** (1 / 1000)

MOST_RANKS_OF_ROUNDED_SUMS = 8
"""Over more ranks, sums rounded to E4M3 lose more than a tenth of the mean gradient (docs/recipes/fp8_lm.md)."""

Bounds = tuple[int, int]
"""Start and end of a tensor in a flat buffer."""


def rounded_sum_warnings(spec: GradientSpec, ranks: int) -> list[str]:
    """Log lines: a warning if ``spec`` rounds sums over more than ``MOST_RANKS_OF_ROUNDED_SUMS`` ranks; else none."""
    if spec.sum != "format" or not spec.quantized or ranks <= MOST_RANKS_OF_ROUNDED_SUMS:
        return []
    return [
        f"warning: gradients.sum=format rounds partial sums over {ranks} data-parallel ranks to {spec.format.upper()}, "
        f"which loses small addends above {MOST_RANKS_OF_ROUNDED_SUMS} ranks: gradients.sum=fp32 sends as many bytes"
    ]


class AutomaticFactor:
    """Factor mu of gradients before the cast; on the device, read by the host only for checkpoints.

    Attributes:
        mu: fp32 [1].
    """

    def __init__(self, device: torch.device) -> None:
        self.mu = torch.ones(1, device=device)
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)  # saturated, all

    def count(self, saturated: torch.Tensor, entries: int) -> None:
        """Add a buffer to the counts of this step: ``saturated`` (int64 scalar) of ``entries`` sums."""
        self._counts[0] += saturated
        self._counts[1] += entries

    def forget(self) -> None:
        """Reset the counts, after a pass that is not a step."""
        self._counts.zero_()

    def end_step(self) -> None:
        """Set mu for the next step, after a weight update; collective over all ranks."""
        dist.all_reduce(self._counts)
        too_many = self._counts[0] > _MOST_SATURATED * self._counts[1]
        self.mu = torch.where(too_many, _LOWEST, (self.mu * _RISE).clamp(max=_HIGHEST))
        self.forget()


class GradientSum:
    """``reduce_scatter`` of flat gradient buffers, in FP8.

    Args:
        spec: format and rounding of the sum.
        factor: required if ``spec.sum`` is "format", else None.
    """

    def __init__(self, spec: GradientSpec, factor: AutomaticFactor | None) -> None:
        assert (factor is not None) == (spec.sum == "format")
        self._format, self._dtype, self._factor = FORMATS[spec.format], DTYPES[spec.format], factor

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
        scale = self.encode_scale(flat, tensors, [group, *sharers])
        codes = self.codes(flat, tensors, scale)
        ranks, part = group.size(), flat.numel() // group.size()
        received = torch.empty_like(codes)
        dist.all_to_all_single(received, codes, group=group)
        total = self.sum_codes(received.view(self._dtype).view(ranks, part))
        own = flat[group.rank() * part :][:part]
        own.zero_()
        first = group.rank() * part
        decode = times / scale
        for (start, end), factor in zip(tensors, decode, strict=True):
            start, end = max(start - first, 0), min(end - first, part)
            if start < end:
                own[start:end] = total[start:end] * factor

    def encode_scale(
        self, flat: torch.Tensor, tensors: Sequence[Bounds], groups: Sequence[dist.ProcessGroup]
    ) -> torch.Tensor:
        """Encode scales, fp32 [len(tensors)], mu included; NaN for a tensor that is not finite."""
        amax = torch.stack(torch._foreach_norm([flat[start:end] for start, end in tensors], torch.inf)).float()
        scale = fp32_encode_scale(max_over(amax, *groups), self._format, "amax_pow2")
        return scale if self._factor is None else scale * self._factor.mu

    def codes(self, flat: torch.Tensor, tensors: Sequence[Bounds], scale: torch.Tensor) -> torch.Tensor:
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

    def sum_codes(self, received: torch.Tensor) -> torch.Tensor:
        """Sum of codes [ranks, n] in rank order: fp32 [n]."""
        total = received[0].float()
        for codes in received[1:]:
            total += codes.float()
            if self._factor is not None:
                total = total.clamp_(-self._format.max, self._format.max).to(self._dtype).float()
        if self._factor is not None:
            self._factor.count((total.abs() == self._format.max).sum(), total.numel())
        return total
