"""Operands of block-scaled GEMMs: codes, and scales in tiles of 128 rows by 4 blocks, as Blackwell's units read them.

The tiles are cuBLAS's layout of block scales. Tiles lie row-major in memory, 512 bytes each, padded with zeros. In a
tile, the scale of row r and block c is byte ``(r % 32) * 16 + (r // 32) * 4 + c``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from megatron_lowprec.kernels.quantize.elements import packed

TILE_ROWS, TILE_BLOCKS = 128, 4
_GROUPS = 4  # of 32 rows in a tile
ALIGNED = 32
"""Entries to which rows of codes are padded: 16 bytes of 4-bit codes, the least that tensor cores' loads take."""


class MxOperand(NamedTuple):
    """Operand [R, K] of a block-scaled GEMM, contracted dimension last.

    Attributes:
        codes: uint8, row-major: [R, P], or [R, P / 2] of 4-bit formats with entry 2i in the low nibble. P is K padded
            with zeros to a multiple of ``ALIGNED``.
        scales: uint8 [bytes], codes of block scales by ``to_tiles``.
        format: of the elements: "e4m3", "e5m2" or "e2m1".
        block: entries along K that share a scale: 32 with E8M0 scales, 16 with E4M3 scales.
        columns: K.
        tensor_scale: fp32 of one entry, the decode scale above the blocks'; None for none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: str
    block: int
    columns: int
    tensor_scale: torch.Tensor | None = None

    def checked(self) -> MxOperand:
        """The same. Products read a row's bytes after another's, whatever strides say."""
        assert self.codes.is_contiguous(), f"codes of strides {self.codes.stride()} are not row-major"
        assert self.scales.is_contiguous(), "tiles of scales are not row-major"
        return self


def aligned_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of ``MxOperand`` from one code an entry, uint8 [R, K], of any strides."""
    missing = -codes.shape[1] % ALIGNED
    codes = pad(codes, (0, missing)) if missing else codes
    return packed(codes) if bits == 4 else codes.contiguous()


def of_experts(operands: Sequence[MxOperand]) -> MxOperand:
    """Operands of experts with one K as one: codes row after row, tiles of each expert, and all their tensor scales."""
    above = [one.tensor_scale.view(1) for one in operands if one.tensor_scale is not None]
    return operands[0]._replace(
        codes=torch.cat([one.checked().codes for one in operands]),
        scales=torch.cat([one.scales for one in operands]),
        tensor_scale=torch.cat(above) if above else None,
    )


def to_tiles(scales: torch.Tensor, block_rows: int = 1, rows: int | None = None) -> torch.Tensor:
    """Scales [R / block_rows, B], one byte each, in tiles; returns uint8 [bytes].

    Args:
        block_rows: rows that share a scale, which is repeated for each.
        rows: R, if the last block has fewer rows.
    """
    if block_rows > 1:
        scales = scales.repeat_interleave(block_rows, 0)[:rows]
    down, across = -(-scales.shape[0] // TILE_ROWS), -(-scales.shape[1] // TILE_BLOCKS)
    padded = pad(scales, (0, across * TILE_BLOCKS - scales.shape[1], 0, down * TILE_ROWS - scales.shape[0]))
    tiles = padded.view(down, _GROUPS, TILE_ROWS // _GROUPS, across, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def bytes_of_tiles(rows: int, blocks: int) -> int:
    """Bytes of ``to_tiles`` of scales [rows, blocks]."""
    return -(-rows // TILE_ROWS) * -(-blocks // TILE_BLOCKS) * TILE_ROWS * TILE_BLOCKS


def from_tiles(tiles: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Scales [rows, blocks] of ``to_tiles``, one a row."""
    down, across = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    in_tiles = tiles.view(down, across, TILE_ROWS // _GROUPS, _GROUPS, TILE_BLOCKS)
    return in_tiles.permute(0, 3, 2, 1, 4).reshape(down * TILE_ROWS, across * TILE_BLOCKS)[:rows, :blocks]
