"""Packed codes of a matrix saved for the backward pass, and their values, in plain torch.

DeepSeek-V3 (arXiv 2412.19437, section 3.3.3) caches activations in blocks of 1x128 with power-of-two scales.
"""

from typing import NamedTuple

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.quantize.reference import (
    decode,
    e8m0_decode_scale,
    encode,
    quantize_operand,
    scale_blocks,
)

BLOCK = 128
"""Columns that share a scale."""
SCALE_RULE = "round_up"
"""The smallest power of two by which nothing saturates."""


class Packed(NamedTuple):
    """Codes of [R, K] and their decode scales.

    Attributes:
        codes: uint8, [R, K] for formats of 8 bits, [R, 3K / 2] for those of 12: two codes in three bytes, from the
            lowest bit up. A NaN has no sign.
        scale: E8M0 bytes (uint8), [R, K / 128]. A block with an Inf or a NaN is NaN.
    """

    codes: torch.Tensor
    scale: torch.Tensor


def packed_cast(x: torch.Tensor, fmt: Format) -> Packed:
    """Packed codes of x [R, K], rounded to nearest even; bf16, fp16 or fp32, K a multiple of 128, contiguous."""
    elements, scale = quantize_operand(x, fmt, (1, BLOCK), scale_format="e8m0", scale_rule=SCALE_RULE)
    codes = encode(elements.masked_fill(elements.isnan(), torch.nan), fmt)
    if fmt.bits == 12:
        low, high = codes[:, ::2].to(torch.int32), codes[:, 1::2].to(torch.int32)
        three = (low & 0xFF, (low >> 8) | ((high & 0xF) << 4), high >> 4)
        codes = torch.stack(three, dim=-1).flatten(1).to(torch.uint8)
    assert codes.dtype == torch.uint8, f"codes of {fmt.bits} bits"
    return Packed(codes, scale)


def packed_decode(codes: torch.Tensor, scale: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Values [R, K] of ``packed_cast``'s result in ``dtype``; exact in bf16 but for scales at the ends of its range."""
    if fmt.bits == 12:
        first, middle, last = codes.unflatten(1, (-1, 3)).to(torch.int32).unbind(-1)
        codes = torch.stack((first | ((middle & 0xF) << 8), (middle >> 4) | (last << 4)), dim=-1).flatten(1)
    return scale_blocks(decode(codes, fmt), e8m0_decode_scale(scale), (1, BLOCK)).to(dtype)
