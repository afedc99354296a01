"""Block amaxes and FP8 codes of flat shards of matrices, as ranks of a distributed optimizer hold them.

A shard's ends cut blocks. The amax of a block is the largest of its partial amaxes over all ranks; each rank then casts
its shard by the scales of whole blocks. The ops have the names of TransformerEngine's (``compute_partial_amax``,
``partial_cast``) and take many matrices at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.multi_tensor_cast.reference import fp8_codes
from megatron_lowprec.kernels.quantize.reference import block_amax


class Shard(NamedTuple):
    """A row-major range of the entries of a matrix.

    Attributes:
        values: fp32 [entries], contiguous; may be empty.
        start: index of the first entry.
        shape: (rows, columns) of the whole matrix.
    """

    values: torch.Tensor
    start: int
    shape: tuple[int, int]

    def blocks(self, block: tuple[int, int]) -> tuple[int, int]:
        """Numbers of blocks along rows and columns of the whole matrix."""
        return -(-self.shape[0] // block[0]), -(-self.shape[1] // block[1])


def partial_amax(shards: Sequence[Shard], block: tuple[int, int]) -> torch.Tensor:
    """Amax of every block of every matrix over the shard's entries; 0 for a block without one, NaN propagates.

    Args:
        shards: one of each matrix; at least one.
        block: (rows, columns) of a block.

    Returns:
        fp32 [blocks], those of a matrix in row-major order, one matrix after the other.
    """
    amaxes = []
    for values, start, (rows, columns) in shards:
        whole = values.new_zeros(rows * columns)
        whole[start : start + values.numel()] = values
        amaxes.append(block_amax(whole.view(rows, columns), block).view(-1))
    return torch.cat(amaxes)


def partial_cast_(
    shards: Sequence[Shard],
    encode_scale: torch.Tensor,
    fmt: Format,
    block: tuple[int, int],
    codes: Sequence[torch.Tensor],
) -> None:
    """Write the codes of each shard to the tensor of ``codes`` at the same index, with the rounding of ``fp8_codes``.

    Args:
        encode_scale: fp32 [blocks] in the order of ``partial_amax``, multiplies entries before rounding.
        codes: uint8 [entries], contiguous.
    """
    first = 0
    for shard, code in zip(shards, codes, strict=True):
        down, across = shard.blocks(block)
        scale = encode_scale[first : first + down * across].view(down, across)
        first += down * across
        scale = scale.repeat_interleave(block[0], 0)[: shard.shape[0]]
        scale = scale.repeat_interleave(block[1], 1)[:, : shard.shape[1]].reshape(-1)
        code.copy_(fp8_codes(shard.values, scale[shard.start : shard.start + shard.values.numel()], fmt))
