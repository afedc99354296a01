"""Fused weights in Megatron's order."""

from __future__ import annotations

import pytest
import torch

from megatron_lowprec.training.models.common.tensor_layout import join_qkv, split_qkv
from megatron_lowprec.training.options.parts import ModelShape


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_are_where_megatron_has_them(groups: int) -> None:
    sizes = {"num_layers": 1, "hidden_size": 12, "ffn_hidden_size": 48, "seq_length": 8, "max_position_embeddings": 8}
    shape = ModelShape(**sizes, num_attention_heads=4, num_query_groups=groups, kv_channels=3)
    # Head numbers as values: queries 0.., keys 100.., values 200..
    q, k, v = (torch.arange(n).repeat_interleave(3) + first for n, first in ((4, 0), (groups, 100), (groups, 200)))
    fused = join_qkv(shape, q, k, v)
    each = 4 // groups
    expected = [h for g in range(groups) for h in (*range(g * each, (g + 1) * each), 100 + g, 200 + g)]
    assert fused.view(-1, 3)[:, 0].tolist() == expected
    for found, given in zip(split_qkv(shape, fused), (q, k, v), strict=True):
        assert torch.equal(found, given)
