"""A quantized tensor: elements on a format's grid, and the decode scale of each block."""

from dataclasses import dataclass

import torch

from megatron_lowprec.formats import FORMATS, Format
from megatron_lowprec.kernels.quantize.reference import decode, e8m0_decode_scale, encode, scale_blocks
from megatron_lowprec.recipe.schema import QuantSpec


@dataclass(frozen=True)
class QuantizedTensor:
    """``dequantize() == elements * decode scale of the entry's block / headroom``, entry by entry.

    Attributes:
        matrix: [R, K] elements in the dtype of the source, exact values of the format; the quantized axis is last.
        matrix_scale: [ceil(R / rows), ceil(K / columns)] decode scales: fp32 numbers, or E8M0 bytes as uint8.
        spec: what was asked.
        shape: shape of the source with the quantized axis last; R is the product of all but its last size.
        axis: the quantized axis in the source.
    """

    matrix: torch.Tensor
    matrix_scale: torch.Tensor
    spec: QuantSpec
    shape: torch.Size
    axis: int = -1

    @property
    def format(self) -> Format:
        """The elements' format row."""
        return FORMATS[self.spec.format]

    @property
    def elements(self) -> torch.Tensor:
        """Values before scaling, in the source's layout and dtype."""
        return self._as_source(self.matrix)

    @property
    def codes(self) -> torch.Tensor:
        """uint8 codes in the low bits, one an entry, in the source's layout."""
        return self._as_source(encode(self.matrix, self.format))

    @property
    def packed_codes(self) -> torch.Tensor:
        """uint8 [R, K / 2] of 4-bit codes, entry 2i in the low nibble; ValueError for wider formats or odd K."""
        if self.format.bits != 4 or self.matrix.shape[1] % 2:
            raise ValueError(
                f"two codes a byte need a 4-bit format and even K, got {self.format.name}, {self.matrix.shape[1]}"
            )
        codes = encode(self.matrix, self.format)
        return codes[:, ::2] | (codes[:, 1::2] << 4)

    @property
    def scale(self) -> torch.Tensor:
        """Decode scales as stored, fp32 or E8M0 bytes, [rows of tiles, tiles along the quantized axis].

        For a source of two or more dimensions with one-row tiles, in the source's layout with the quantized axis
        shortened.
        """
        if self.spec.block is not None and self.spec.block[0] == 1:
            return self.matrix_scale.view(*self.shape[:-1], self.matrix_scale.shape[1]).movedim(-1, self.axis)
        return self.matrix_scale

    @property
    def decode_scale(self) -> torch.Tensor:
        """``matrix_scale`` as fp32 numbers."""
        return self.matrix_scale if self.matrix_scale.is_floating_point() else e8m0_decode_scale(self.matrix_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values that the codes and scales stand for, headroom divided out, in the source's layout."""
        values = scale_blocks(self.matrix.to(torch.float32), self.decode_scale, block_sizes(self.spec, self.matrix))
        return self._as_source((values / self.spec.headroom).to(dtype))

    @staticmethod
    def from_codes(codes: torch.Tensor, scale: torch.Tensor, spec: QuantSpec) -> "QuantizedTensor":
        """From stored 2-D codes and decode scales, quantized axis last."""
        return QuantizedTensor(decode(codes, FORMATS[spec.format]), scale, spec, codes.shape)

    def _as_source(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.view(self.shape).movedim(-1, self.axis)


def block_sizes(spec: QuantSpec, matrix: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of a block of ``matrix`` [R, K], contracted dimension last."""
    rows, columns = matrix.shape
    return spec.block or (max(1, rows) if spec.granularity == "tensor" else 1, max(1, columns))
