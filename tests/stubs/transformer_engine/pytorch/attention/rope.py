"""Rotary embedding of [s, b, heads, d] by angles [s, 1, 1, d or less]."""

import torch


def apply_rotary_pos_emb(
    t: torch.Tensor, freqs: torch.Tensor, tensor_format: str = "sbhd", interleaved: bool = False, fused: bool = False
) -> torch.Tensor:
    assert (tensor_format, interleaved) == ("sbhd", False)
    turned, rest = t.split([freqs.shape[-1], t.shape[-1] - freqs.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * freqs.cos().to(t.dtype) + swapped * freqs.sin().to(t.dtype), rest], dim=-1)
