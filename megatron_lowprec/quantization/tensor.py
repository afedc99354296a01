"""``QuantizedTensor``: rowwise data, columnwise data, and their decode scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_lowprec.formats import FORMATS, Format
from megatron_lowprec.kernels.mx_gemm.operand import from_tiles
from megatron_lowprec.kernels.quantize.elements import packed, unpacked
from megatron_lowprec.kernels.quantize.reference import decode, e8m0_decode_scale, encode, scale_blocks
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.quant_spec import QuantSpec
from megatron_lowprec.recipe.schema import HadamardSpec
from megatron_lowprec.scaling import granularity_of

ScaleLayout = Literal["plain", "tiles_128x4"]


@dataclass(slots=True, eq=False)
class QuantizedTensor:
    """A tensor quantized rowwise, columnwise or both, as TransformerEngine names these.

    A GEMM contracts the last dimension of both operands' data. Rowwise data have the tensor's layout; columnwise data
    are those of its transpose. The type serves operands of emulated and native GEMMs, FP8 primary weights, cached
    weights and inputs saved for backward.

    ``dequantize() == data * scale of the entry's block * tensor scale / headroom``, entry by entry, without the block's
    scale if ``folded``. ``validate`` checks what the attributes promise.

    Attributes:
        shape: shape of the source, ``axis`` last; [M, N] in a GEMM.
        dtype: dtype of the source.
        spec: format, granularity and scale rule of both directions; None if the recipe does not quantize the tensor.
        rowwise_data: [R, K], R the product of all sizes of ``shape`` but the last, K the last. Values of the format's
            grid in ``dtype``, or codes in torch's FP8 dtype, or uint8 of two 4-bit ones a byte; a native GEMM's may be
            zero-padded. None if absent.
        rowwise_scale: decode scales [ceil(R / block rows), ceil(K / block columns)], fp32 or codes of ``scale_format``
            (uint8); for 128x128 blocks of a native GEMM, columns in multiples of 4. None if ``folded``.
        columnwise_data, columnwise_scale: the same for the transpose [N, M]; two-dimensional tensors only.
        axis: dimension of the source that is last in rowwise data.
        folded: block scales are multiplied into the data, which are then off the format's grid.
        rowwise_tensor_scale, columnwise_tensor_scale: fp32 [1, 1], decode scale of the tensor above its block scales,
            or one for each outer block; None if the spec has none. The directions differ if a transform precedes one.
        rowwise_transform, columnwise_transform: the Hadamard transform of which the data are rounded; None for none.
        scale_layout: ``"plain"``, as above; ``"tiles_128x4"``, uint8 [bytes] in tiles of 128 rows by 4 blocks, as
            Blackwell's GEMMs read scales, one for each row.
        beside: the rowwise values as codes and scales, for a backward pass that quantizes them again.
    """

    shape: torch.Size
    dtype: torch.dtype
    spec: QuantSpec | None
    rowwise_data: torch.Tensor | None = None
    rowwise_scale: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale: torch.Tensor | None = None
    axis: int = -1
    folded: bool = False
    rowwise_tensor_scale: torch.Tensor | None = None
    columnwise_tensor_scale: torch.Tensor | None = None
    rowwise_transform: HadamardSpec | None = None
    columnwise_transform: HadamardSpec | None = None
    scale_layout: ScaleLayout = "plain"
    beside: QuantizedTensor | None = None

    def rowwise(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rowwise data and scale."""
        assert self.rowwise_data is not None, "no rowwise data"
        return self.rowwise_data, self.rowwise_scale

    def columnwise(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Columnwise data and scale."""
        assert self.columnwise_data is not None, "no columnwise data"
        return self.columnwise_data, self.columnwise_scale

    def validate(self) -> QuantizedTensor:
        """The tensor itself; ValueError names the first attribute that contradicts the others."""
        for name, length, scale_of_tensor, transform in (
            ("rowwise", self.shape[-1], self.rowwise_tensor_scale, self.rowwise_transform),
            ("columnwise", self.shape[0], self.columnwise_tensor_scale, self.columnwise_transform),
        ):
            data, scale = getattr(self, f"{name}_data"), getattr(self, f"{name}_scale")
            if data is None:
                found = {"scale": scale, "tensor scale": scale_of_tensor, "transform": transform}
                wrong = next((f"a {each} without data" for each, value in found.items() if value is not None), None)
            else:
                rows = self.shape.numel() // max(1, length)
                wrong = self._why_data_are_wrong(data, rows, length, transform)
                wrong = wrong or self._why_scales_are_wrong(data, scale, scale_of_tensor)
            if wrong:
                raise ValueError(f"{name} data of a tensor {tuple(self.shape)}: {wrong}")
        return self

    def _why_data_are_wrong(
        self, data: torch.Tensor, rows: int, length: int, transform: HadamardSpec | None
    ) -> str | None:
        if data.dim() != 2 or data.shape[0] < rows or data.shape[1] * _codes_an_entry(data) < length:
            return f"shape {tuple(data.shape)}, expected at least {(rows, length)}"
        if transform is not None and data.shape[1] * _codes_an_entry(data) % transform.block:
            return f"{data.shape[1]} columns are no whole blocks of a transform of {transform.block}"
        return None

    def _why_scales_are_wrong(
        self, data: torch.Tensor, scale: torch.Tensor | None, of_tensor: torch.Tensor | None
    ) -> str | None:
        spec = self.spec
        if spec is None:
            given = self.folded or scale is not None or of_tensor is not None
            return "scales of a tensor that is not quantized" if given else None
        if data.numel() == 0:
            return None
        if self.folded != (scale is None):
            return f"block scales are {'kept beside' if self.folded else 'lacking, and not folded into'} the data"
        if self.folded and not spec.folds_scale:
            return f"{spec.scale_format} scales by {spec.scale_rule} do not fold exactly"
        if (of_tensor is not None) != (spec.tensor_scale is not None):
            return f"tensor scale {'without' if of_tensor is not None else 'lacking, with'} one in the spec"
        outer = spec.outer_block or (data.shape[0], data.shape[1])
        above = (-(-data.shape[0] // outer[0]), -(-data.shape[1] // outer[1]))
        if of_tensor is not None and (of_tensor.dtype, tuple(of_tensor.shape)) != (torch.float32, above):
            return f"tensor scale {tuple(of_tensor.shape)} of {of_tensor.dtype}, expected {above} in fp32"
        if scale is None:
            return None
        if scale.dtype != (torch.float32 if spec.scale_format == "fp32" else torch.uint8):
            return f"scales of {scale.dtype} for {spec.scale_format}"
        block, shape = block_sizes(spec, data), tuple(scale.shape)
        blocks = (-(-data.shape[0] // block[0]), -(-data.shape[1] // block[1]))
        if self.scale_layout == "plain" and (len(shape) != 2 or shape[0] < blocks[0] or shape[1] < blocks[1]):
            return f"scales {shape}, expected at least {blocks}"
        return None

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
        return packed(encode(data, self.format))

    @property
    def scale(self) -> torch.Tensor:
        """Scales of blocks as stored, fp32 or codes, [rows of blocks, blocks along the quantized axis].

        With one-row blocks the scales have the source's layout, with one entry a block along the quantized axis.
        """
        assert self.rowwise_scale is not None
        if self._spec.block is not None and self._spec.block[0] == 1:
            return self.rowwise_scale.view(*self.shape[:-1], self.rowwise_scale.shape[1]).movedim(-1, self.axis)
        return self.rowwise_scale

    @property
    def decode_scale(self) -> torch.Tensor:
        """Decode scales of rowwise data in fp32, the tensor's scale included."""
        return self._decode_scale(self.rowwise_scale, self.rowwise_tensor_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values of data and scales in the source's layout, headroom divided out.

        AssertionError for an operand behind a Hadamard transform: its data are transformed entries.
        """
        if self.rowwise_data is not None:
            assert self.rowwise_transform is None, "data are transformed"
            values = self._values(*self.rowwise(), self.rowwise_tensor_scale, self.shape[-1])
            return self._as_source(values.to(dtype))
        assert self.columnwise_transform is None, "data are transformed"
        return self._values(*self.columnwise(), self.columnwise_tensor_scale, self.shape[0]).to(dtype).t()

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
        assert not self.folded, "scales are multiplied into the data"
        assert scale is not None
        assert data.numel() == self.shape.numel(), "data are padded"
        return data.to(self.dtype)

    def _decode_scale(self, scale: torch.Tensor | None, of_tensor: torch.Tensor | None) -> torch.Tensor:
        assert scale is not None
        return decode_scales(self._spec, scale, of_tensor)

    def _values(
        self, data: torch.Tensor, scale: torch.Tensor | None, of_tensor: torch.Tensor | None, length: int
    ) -> torch.Tensor:
        """fp32 [R, length] of rowwise or columnwise data, without padding."""
        if data.dtype == torch.uint8:
            values = decode(unpacked(data.view(torch.uint8)), self.format)
        else:
            values = data.to(torch.float32)
        if scale is not None and self.scale_layout == "tiles_128x4":
            block = block_sizes(self._spec, data)[1]
            scale = from_tiles(scale, data.shape[0], -(-length // block))
            values = scale_blocks(values[:, :length], self._decode_scale(scale, of_tensor), (1, block))
        elif scale is not None:
            blocks = block_sizes(self._spec, values)
            scale = scale[: -(-values.shape[0] // blocks[0]), : -(-values.shape[1] // blocks[1])]
            values = scale_blocks(values, self._decode_scale(scale, of_tensor), blocks)
        elif of_tensor is not None:
            values = scale_blocks(values, of_tensor, self._spec.outer_block or (1, 1))
        rows = self.shape.numel() // max(1, length)
        return values[:rows, :length] / (self.spec.headroom if self.spec else 1.0)

    def _as_source(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.view(self.shape).movedim(-1, self.axis)


def _codes_an_entry(data: torch.Tensor) -> int:
    return 2 if data.dtype == torch.uint8 else 1


def block_sizes(spec: QuantSpec, matrix: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of a block of ``matrix`` [R, K], contracted dimension last."""
    rows, columns = matrix.shape
    return granularity_of(spec.granularity).block_of(rows, columns)


def as_numbers(scale: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Scales in fp32, from fp32 or codes of ``scale_format``."""
    if scale.is_floating_point():
        return scale
    return e8m0_decode_scale(scale) if scale_format == "e8m0" else decode(scale, FORMATS[scale_format])


def decode_scales(spec: QuantSpec, scale: torch.Tensor, of_tensor: torch.Tensor | None) -> torch.Tensor:
    """fp32 decode scales of blocks, as stored, times that of the tensor or of their outer blocks, if there is one."""
    numbers = as_numbers(scale, spec.scale_format)
    if of_tensor is None or spec.outer_block is None or spec.block is None:
        return numbers if of_tensor is None else numbers * of_tensor
    rows, columns = (outer // inner for outer, inner in zip(spec.outer_block, spec.block, strict=True))
    return scale_blocks(numbers, of_tensor, (rows, columns))


def quantized_direction(
    matrix: torch.Tensor | QuantizedTensor,
    spec: QuantSpec | None,
    rowwise: bool,
    data: torch.Tensor,
    transform: Transform | None = None,
    scale: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
) -> QuantizedTensor:
    """One direction of a matrix or weight; block scales are in the data unless they are given."""
    side, of = "rowwise" if rowwise else "columnwise", None if transform is None else transform.spec
    fields: dict[str, Any] = {"data": data, "scale": scale, "tensor_scale": tensor_scale, "transform": of}
    of_side = {f"{side}_{field}": value for field, value in fields.items()}
    return QuantizedTensor(matrix.shape, matrix.dtype, spec, folded=spec is not None and scale is None, **of_side)
