"""Gradients stored as FP8 codes, many tensors in a flat buffer: cast, count, requantize and sum over ranks.

A tensor has one power-of-two encode scale. ``Bounds`` are the start and end of a tensor in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.multi_tensor_cast.reference import fp8_codes
from megatron_lowprec.kernels.quantize.reference import fp32_encode_scale

Bounds = tuple[int, int]
"""Start and end of a tensor in a flat buffer."""

_COUNTED_AT_ONCE = 1 << 25  # codes: the masked copy of a whole buffer might not fit in memory


def parts_between(tensors: Sequence[Bounds], first: int, end: int) -> list[Bounds]:
    """Each tensor's part in entries ``first`` to ``end`` of the buffer, counted from ``first``; may be empty."""
    clipped = [(min(max(bound, first), end) - first for bound in bounds) for bounds in tensors]
    return [(start, stop) for start, stop in clipped]


def gradient_scale(amax: torch.Tensor, fmt: Format, mu: torch.Tensor) -> torch.Tensor:
    """Encode scales ``mu`` 2^floor(log2(M / amax)) with M the format's maximum: fp32, the shape of ``amax``.

    NaN where ``amax`` is not finite; at most fp32's maximum.

    Args:
        amax: fp32, any shape, not negative.
        mu: fp32 [1].
    """
    scale = fp32_encode_scale(amax, fmt, "amax_pow2") * mu
    return scale.clamp(max=torch.finfo(torch.float32).max)


def cast_gradient_(
    values: torch.Tensor, codes: torch.Tensor, amax: torch.Tensor, mu: torch.Tensor, fmt: Format
) -> None:
    """Write the codes of one tensor by ``gradient_scale`` of its own amax, and the amax.

    Args:
        values: fp32 [entries], contiguous, at least one.
        codes: uint8 [entries], written.
        amax: fp32 [1], written; NaN if an entry is.
    """
    torch.linalg.vector_norm(values, torch.inf, dim=0, keepdim=True, out=amax)
    codes.copy_(fp8_codes(values, gradient_scale(amax, fmt, mu), fmt))


@lru_cache(maxsize=8)
def largest_code(fmt: Format) -> int:
    """Code of the format's maximum."""
    return int(torch.tensor(fmt.max).to(DTYPES[fmt.name]).view(torch.uint8))


def count_saturated(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Number of codes, uint8 [n], of the format's maximum, of either sign: int64 []."""
    counts = [((part & 0x7F) == largest_code(fmt)).sum() for part in codes.split(_COUNTED_AT_ONCE)]
    return torch.stack(counts).sum()


def requantize_(codes: torch.Tensor, tensors: Sequence[Bounds], ratio: torch.Tensor, fmt: Format) -> None:
    """Multiply the values of each tensor's codes by its entry of ``ratio``, fp32, and round to nearest even.

    Exact but for the format's subnormals, as long as the ratios are powers of two up to 1.
    """
    for (start, end), factor in zip(tensors, ratio, strict=True):
        place = codes[start:end].view(DTYPES[fmt.name])
        place.copy_(place.float().mul_(factor).clamp_(-fmt.max, fmt.max))


def sum_codes_(
    received: torch.Tensor,
    tensors: Sequence[Bounds],
    factor: torch.Tensor,
    fmt: Format,
    rounds: bool,
    total: torch.Tensor,
) -> None:
    """Write the sum over ranks of each tensor's codes times its entry of ``factor``.

    Args:
        received: uint8 [ranks, n], codes of all ranks, added in this order.
        tensors: bounds in 0 to n, may be empty; what lies outside of them is not written.
        factor: fp32 [len(tensors)].
        rounds: round each partial sum to the format, saturating.
        total: fp32 [n], written.
    """
    dtype = DTYPES[fmt.name]
    for (start, end), scale in zip(tensors, factor, strict=True):
        place = total[start:end]
        place.copy_(received[0, start:end].view(dtype))
        for codes in received[1:, start:end]:
            place += codes.view(dtype).float()
            if rounds:
                place.copy_(place.clamp(-fmt.max, fmt.max).to(dtype))
        place *= scale
