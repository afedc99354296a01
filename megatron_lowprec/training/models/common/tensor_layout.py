"""Layouts of fused weights: Megatron's, and those of Hugging Face's tensors.

``linear_qkv`` stores, for each group of query heads, its queries, then its key head, then its value head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_lowprec.training.models.common.interface import TensorMap
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


def gated_mlp_maps(
    ours: str, theirs: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[TensorMap]:
    """Weights of a gated MLP without biases, whose gate and up projection Hugging Face stores apart."""
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    yield TensorMap(f"{ours}.linear_fc1.weight", (gate, up), to_hf=lambda tensor: tensor.chunk(2), from_hf=concatenate)
    yield TensorMap(f"{ours}.linear_fc2.weight", (down,))


def transpose(tensor: torch.Tensor) -> torch.Tensor:
    """Weight [out, in] <-> [in, out]; a bias is its own transpose."""
    return tensor.t()


def concatenate(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenate along one dimension. Imports torch when called, so that architectures load without it."""
    import torch

    return torch.cat(list(tensors), dim)
