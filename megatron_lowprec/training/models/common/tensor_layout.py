"""Layouts of fused weights: Megatron's, and those of Hugging Face's tensors.

``linear_qkv`` stores, for each group of query heads, its queries, then its key head, then its value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_lowprec.training.options.parts import ModelShape

if TYPE_CHECKING:
    import torch


def split_qkv(shape: ModelShape, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight [out, in] or bias [out] of linear_qkv -> those of queries, keys and values, heads in order."""
    groups, channels = shape.num_query_groups, shape.kv_channels
    queries = shape.num_attention_heads // groups
    parts = fused.unflatten(0, (groups, queries + 2, channels))
    return parts[:, :queries].flatten(0, 2), parts[:, queries].flatten(0, 1), parts[:, queries + 1].flatten(0, 1)


def join_qkv(shape: ModelShape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The inverse of ``split_qkv``."""
    groups, channels = shape.num_query_groups, shape.kv_channels
    queries = shape.num_attention_heads // groups
    parts = [
        query.unflatten(0, (groups, queries, channels)),
        key.unflatten(0, (groups, 1, channels)),
        value.unflatten(0, (groups, 1, channels)),
    ]
    return concatenate(parts, dim=1).flatten(0, 2)


def transpose(tensor: torch.Tensor) -> torch.Tensor:
    """Weight [out, in] <-> [in, out]; a bias is its own transpose."""
    return tensor.t()


def concatenate(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate along one dimension. Imports torch when called, so that architectures load without it."""
    import torch

    return torch.cat(list(tensors), dim)
