"""Fused weights in Megatron's order."""

from __future__ import annotations

import pytest
import torch

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.tensor_layout import join_qkv, split_qkv


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_are_where_megatron_has_them(groups: int) -> None:
    config = Config(num_attention_heads=4, num_query_groups=groups, kv_channels=3)
    # Head numbers as values: queries 0.., keys 100.., values 200..
    q, k, v = (torch.arange(n).repeat_interleave(3) + first for n, first in ((4, 0), (groups, 100), (groups, 200)))
    fused = join_qkv(config, q, k, v)
    each = 4 // groups
    expected = [h for g in range(groups) for h in (*range(g * each, (g + 1) * each), 100 + g, 200 + g)]
    assert fused.view(-1, 3)[:, 0].tolist() == expected
    for found, given in zip(split_qkv(config, fused), (q, k, v), strict=True):
        assert torch.equal(found, given)
