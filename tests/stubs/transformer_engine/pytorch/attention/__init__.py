"""Causal attention, over the ranks of a context-parallel group by gathering keys, values and queries on each."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import scaled_dot_product_attention


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.1,
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.scale, self.cp_group = attention_dropout, softmax_scale, cp_group
        self.get_rng_state_tracker = get_rng_state_tracker

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
    ) -> torch.Tensor:
        assert attn_mask_type == "causal"
        q, k, v = (_whole(t, self.cp_group).permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        with self.get_rng_state_tracker().fork() if dropout else contextlib.nullcontext():
            out = scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        out = _share(out.permute(2, 0, 1, 3), self.cp_group)
        return out.reshape(*out.shape[:2], -1)


def _whole(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[s / ranks, ...] of each rank -> [s, ...]: rank r has chunks r and 2 ranks - 1 - r."""
    if group is None:
        return x
    ranks = dist.get_world_size(group)
    shares = all_gather(x.contiguous(), group=group)
    chunks: list[Any] = [None] * (2 * ranks)
    for rank, share in enumerate(shares):
        chunks[rank], chunks[2 * ranks - 1 - rank] = share.chunk(2)
    return torch.cat(chunks)


def _share(x: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return x
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = x.chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
