"""``QuantizedTensor``: rowwise data, columnwise data, and their decode scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_lowprec.formats import FORMATS, Format
from megatron_lowprec.kernels.quantize.reference import decode, e8m0_decode_scale, encode, scale_blocks
from megatron_lowprec.recipe.schema import QuantSpec
from megatron_lowprec.scaling import granularity_of


@dataclass(slots=True, eq=False)
class QuantizedTensor:
    """A tensor quantized rowwise, columnwise or both, as TransformerEngine names these.

    A GEMM contracts the last dimension of both operands' data. Rowwise data have the tensor's layout; columnwise data
    are those of its transpose. The type serves operands of emulated and native GEMMs, FP8 primary weights, cached
    weights and inputs saved for backward.

    ``dequantize() == data * decode scale of the entry's block / headroom``, entry by entry.

    Attributes:
        shape: shape of the source, ``axis`` last; [M, N] in a GEMM.
        dtype: dtype of the source.
        spec: format, granularity and scale rule of both directions; None if the recipe does not quantize the tensor.
        rowwise_data: [R, K], R the product of all sizes of ``shape`` but the last, K the last. Values of the format's
            grid in ``dtype``, or codes in torch's FP8 dtype; a native GEMM's may be zero-padded. None if absent.
        rowwise_scale: decode scales [ceil(R / block rows), ceil(K / block columns)], fp32 or E8M0 bytes (uint8); for
            128x128 blocks of a native GEMM, columns in multiples of 4. None if power-of-two scales are multiplied
            into the data, which are then off the grid.
        columnwise_data, columnwise_scale: the same for the transpose [N, M]; two-dimensional tensors only.
        axis: dimension of the source that is last in rowwise data.
    """

    shape: torch.Size
    dtype: torch.dtype
    spec: QuantSpec | None
    rowwise_data: torch.Tensor | None = None
    rowwise_scale: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale: torch.Tensor | None = None
    axis: int = -1

    def rowwise(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rowwise data and scale."""
        assert self.rowwise_data is not None, "no rowwise data"
        return self.rowwise_data, self.rowwise_scale

    def columnwise(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Columnwise data and scale."""
        assert self.columnwise_data is not None, "no columnwise data"
        return self.columnwise_data, self.columnwise_scale

    @property
    def format(self) -> Format:
        """Row of ``FORMATS`` of the elements."""
        return FORMATS[self._spec.format]

    @property
    def elements(self) -> torch.Tensor:
        """Values before scaling, in the source's layout and dtype."""
        return self._as_source(self._rowwise_elements())

    @property
    def codes(self) -> torch.Tensor:
        """Codes of ``encode``, one an entry, in the source's layout."""
        return self._as_source(encode(self._rowwise_elements(), self.format))

    @property
    def packed_codes(self) -> torch.Tensor:
        """uint8 [R, K / 2] of 4-bit codes, entry 2i in the low nibble; ValueError for wider formats or odd K."""
        data = self._rowwise_elements()
        if self.format.bits != 4 or data.shape[1] % 2:
            raise ValueError(
                f"two codes a byte need a 4-bit format and even K, got {self.format.name}, {data.shape[1]}"
            )
        codes = encode(data, self.format)
        return codes[:, ::2] | (codes[:, 1::2] << 4)

    @property
    def scale(self) -> torch.Tensor:
        """Decode scales as stored, fp32 or E8M0 bytes, [rows of blocks, blocks along the quantized axis].

        With one-row blocks the scales have the source's layout, with one entry a block along the quantized axis.
        """
        assert self.rowwise_scale is not None
        if self._spec.block is not None and self._spec.block[0] == 1:
            return self.rowwise_scale.view(*self.shape[:-1], self.rowwise_scale.shape[1]).movedim(-1, self.axis)
        return self.rowwise_scale

    @property
    def decode_scale(self) -> torch.Tensor:
        """``rowwise_scale`` in fp32."""
        assert self.rowwise_scale is not None
        return as_numbers(self.rowwise_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values of data and scales in the source's layout, headroom divided out.

        Not for an operand behind a Hadamard transform: its data are transformed entries, padded to whole blocks.
        """
        if self.rowwise_data is not None:
            return self._as_source(self._values(*self.rowwise(), self.shape[-1]).to(dtype))
        return self._values(*self.columnwise(), self.shape[0]).to(dtype).t()

    @staticmethod
    def from_codes(codes: torch.Tensor, scale: torch.Tensor, spec: QuantSpec) -> QuantizedTensor:
        """A tensor from stored 2-D codes and decode scales, quantized axis last."""
        elements = decode(codes, FORMATS[spec.format])
        return QuantizedTensor(codes.shape, elements.dtype, spec, elements, scale)

    @property
    def _spec(self) -> QuantSpec:
        assert self.spec is not None, "not quantized"
        return self.spec

    def _rowwise_elements(self) -> torch.Tensor:
        """Rowwise data as values of the format's grid; AssertionError for those of some GEMM operands."""
        data, scale = self.rowwise()
        assert scale is not None, "scales are multiplied into the data"
        assert data.numel() == self.shape.numel(), "data are padded"
        return data.to(self.dtype)

    def _values(self, data: torch.Tensor, scale: torch.Tensor | None, length: int) -> torch.Tensor:
        """fp32 [R, length] of rowwise or columnwise data, without padding."""
        values = data.to(torch.float32)
        if scale is not None:
            blocks = block_sizes(self._spec, data)
            scale = scale[: -(-data.shape[0] // blocks[0]), : -(-data.shape[1] // blocks[1])]
            values = scale_blocks(values, as_numbers(scale), blocks)
        rows = self.shape.numel() // max(1, length)
        return values[:rows, :length] / (self.spec.headroom if self.spec else 1.0)

    def _as_source(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.view(self.shape).movedim(-1, self.axis)


def block_sizes(spec: QuantSpec, matrix: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of a block of ``matrix`` [R, K], contracted dimension last."""
    rows, columns = matrix.shape
    return granularity_of(spec.granularity).block_of(rows, columns)


def as_numbers(scale: torch.Tensor) -> torch.Tensor:
    """Decode scales in fp32, from fp32 or E8M0 bytes."""
    return scale if scale.is_floating_point() else e8m0_decode_scale(scale)
