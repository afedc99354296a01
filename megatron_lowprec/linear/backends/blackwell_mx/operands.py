"""Quantized tensors in the layout of Blackwell's units: codes in torch's dtypes, padded, and scales in tiles."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import pad

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.mx_gemm import reference
from megatron_lowprec.kernels.mx_gemm.operand import ALIGNED, MxOperand, to_tiles
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import QuantSpec

CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}


def operand_of(quantized: QuantizedTensor, columnwise: bool) -> MxOperand:
    """One direction of a tensor quantized by ``BlackwellMxGemms``.

    K has the zeros of the transform, and those of the layout only in an operator of a compiled graph, which gets data
    without the tensor's shape and dtype.
    """
    data, scale = quantized.columnwise() if columnwise else quantized.rowwise()
    above = quantized.columnwise_tensor_scale if columnwise else quantized.rowwise_tensor_scale
    spec = quantized.spec
    assert spec is not None
    assert spec.block is not None
    assert scale is not None
    if quantized.dtype == data.dtype:
        columns = data.shape[1] * 8 // FORMATS[spec.format].bits
    else:
        transform = quantized.columnwise_transform if columnwise else quantized.rowwise_transform
        length, whole = quantized.shape[0 if columnwise else 1], 1 if transform is None else transform.block
        columns = -(-length // whole) * whole
    return MxOperand(data.view(torch.uint8), scale, spec.format, spec.block[1], columns, above)


def with_tiles(made: QuantizedTensor) -> QuantizedTensor:
    """A tensor of packed codes and plain scales, changed to the units' layout."""
    if made.rowwise_data is not None:
        made.rowwise_data, made.rowwise_scale = in_tiles(made.spec, *made.rowwise(), made.shape[0])
    if made.columnwise_data is not None:
        made.columnwise_data, made.columnwise_scale = in_tiles(made.spec, *made.columnwise(), made.shape[1])
    made.scale_layout = "tiles_128x4"
    return made


def in_tiles(
    spec: QuantSpec | None, codes: torch.Tensor, scale: torch.Tensor | None, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, bytes] in torch's dtype, padded with zeros, and their scales in tiles, one for each row.

    Args:
        scale: of each row, or of each block of rows.
    """
    assert spec is not None
    assert spec.block is not None
    assert scale is not None
    missing = -codes.shape[1] % (ALIGNED * FORMATS[spec.format].bits // 8)
    codes = pad(codes, (0, missing)) if missing else codes
    block_rows = 1 if scale.shape[0] == rows else spec.block[0]
    return codes.view(CODES[spec.format]), to_tiles(scale, block_rows, rows)


def decoded(quantized: QuantizedTensor, columnwise: bool) -> QuantizedTensor:
    """One direction as the emulated backend holds it."""
    found = replace(quantized, folded=True, scale_layout="plain", rowwise_scale=None, columnwise_scale=None)
    values = reference.values(operand_of(quantized, columnwise)).to(torch.bfloat16)  # of all models that come here
    if columnwise:
        found.columnwise_data = values
    else:
        found.rowwise_data = values
    return found
