"""Scales of weights that FSDP2 gathers as codes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowprec import get_recipe
from megatron_lowprec.kernels.gemm.native import SCALE_ALIGNMENT
from megatron_lowprec.linear.sharding.primary_shard import set_scales
from megatron_lowprec.quantization.primary_weight import weight_encode_scale


@pytest.mark.parametrize(
    ("recipe", "shapes"), [("fp8_current", [(1,)] * 5), ("fp8_blockwise", [(3, 1), (2, 5), (1, 4)])]
)
def test_scales_of_each_weight_begin_where_cublas_takes_them(recipe: str, shapes: list[tuple[int, ...]]) -> None:
    """A multiple of 16 bytes: cuBLAS refused the product of every weight but the first."""
    spec: Any = get_recipe(recipe).gemms["fprop"].weight
    shards: Any = [SimpleNamespace(spec=spec, scaled_amax=torch.rand(shape) + 0.5) for shape in shapes]
    set_scales(shards)
    for shard in shards:
        assert shard.decode_scale.data_ptr() % SCALE_ALIGNMENT == 0
        assert torch.equal(shard.encode_scale, weight_encode_scale(shard.scaled_amax, spec))
        assert torch.equal(shard.decode_scale, 1 / shard.encode_scale)
