"""Megatron's order of queries, keys and values in one tensor, and their own. torch alone.

``linear_qkv`` holds for each group of query heads its queries, then its key head, then its value head.
"""

from __future__ import annotations

import torch

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.sizes import require


def split_qkv(config: Config, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight [out, in] or bias [out] of linear_qkv -> those of queries, keys and values, heads in order."""
    groups, channels = config.num_query_groups, require(config.kv_channels)
    queries = require(config.num_attention_heads) // groups
    parts = fused.unflatten(0, (groups, queries + 2, channels))
    return parts[:, :queries].flatten(0, 2), parts[:, queries].flatten(0, 1), parts[:, queries + 1].flatten(0, 1)


def join_qkv(config: Config, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The inverse of ``split_qkv``."""
    groups, channels = config.num_query_groups, require(config.kv_channels)
    queries = require(config.num_attention_heads) // groups
    parts = [
        query.unflatten(0, (groups, queries, channels)),
        key.unflatten(0, (groups, 1, channels)),
        value.unflatten(0, (groups, 1, channels)),
    ]
    return torch.cat(parts, dim=1).flatten(0, 2)
