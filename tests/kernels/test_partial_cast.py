"""Shards of a matrix have the amaxes and codes of the whole one."""

import pytest
import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.partial_cast.reference import Shard, partial_amax, partial_cast_
from megatron_lowprec.kernels.quantize.reference import encode, fp32_encode_scale, quantize_operand

BLOCK = (128, 128)


@pytest.mark.parametrize("shape", [(256, 384), (200, 130)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_shards_have_the_codes_of_the_whole_matrix(shape: tuple[int, int], ranks: int) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    whole[:128, :128] = 0.0
    elements, decode_scale = quantize_operand(whole, FORMATS["e4m3"], BLOCK, scale_format="fp32", scale_rule="amax")
    entries = -(-whole.numel() // ranks)
    shards = [Shard(part, i * entries, shape) for i, part in enumerate(whole.view(-1).split(entries))]
    amax = torch.stack([partial_amax([shard], BLOCK) for shard in shards]).amax(0)
    scale = fp32_encode_scale(amax, FORMATS["e4m3"], "amax")
    assert torch.equal(torch.ones_like(scale) / scale, decode_scale.view(-1))
    codes = torch.empty(whole.numel(), dtype=torch.uint8)
    for shard, part in zip(shards, codes.split(entries), strict=True):
        partial_cast_([shard], scale, FORMATS["e4m3"], BLOCK, [part])
    assert torch.equal(codes.view(shape), encode(elements, FORMATS["e4m3"]))


def test_matrices_follow_one_another() -> None:
    shards = [Shard(torch.full((n,), float(n)), 1, (130, 200)) for n in (200, 0, 3)]
    expected = [200.0, 200.0, 0, 0, 0, 0, 0, 0, 3.0, 0, 0, 0]
    assert partial_amax(shards, BLOCK).tolist() == expected
