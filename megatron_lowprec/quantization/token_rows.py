"""Rowwise codes and scales of tokens as rows of bytes, which one collective sends, permutes and sorts."""

from collections.abc import Sequence

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.quantize.elements import unpacked
from megatron_lowprec.kernels.quantize.reference import decode, e8m0_decode_scale
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.fp8_dispatch import code_bytes, scales_of_token
from megatron_lowprec.recipe.schema import QuantSpec


def pack_rows(x: QuantizedTensor) -> torch.Tensor:
    """Rowwise codes and decode scales of x [T, K], uint8 [T, ``dispatched_bytes``].

    Codes come first, two a byte in a 4-bit format (K even). Scales that are powers of two follow as E8M0 bytes, others
    as fp32.

    Args:
        x: a scale per row, or blocks of one row. Rows beyond T are padding and dropped.
    """
    tokens, features = x.shape
    data, scale = x.rowwise()
    assert scale is not None
    assert x.spec is not None
    in_bytes = data.element_size() == 1
    codes = data.view(torch.uint8) if in_bytes else x.packed_codes if x.format.bits == 4 else x.codes
    scale = scale[:tokens, : scales_of_token(x.spec, features)]
    if scale.is_floating_point() and x.spec.power_of_two_scale:
        scale = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)  # 2^-127, subnormal in fp32, is byte 0
    return torch.cat((codes[:tokens], scale.contiguous().view(torch.uint8)), dim=1)


def unpack_rows(rows: torch.Tensor, features: int, spec: QuantSpec, dtype: torch.dtype) -> QuantizedTensor:
    """The tensor [T, features] of ``pack_rows``, rowwise.

    Args:
        rows: uint8 [T, ``dispatched_bytes``].
        dtype: of the tensor that was quantized.
    """
    width = code_bytes(spec, features)
    # a copy even of one row, whose scales may begin at an address that fp32 cannot
    scale = rows[:, width:].clone(memory_format=torch.contiguous_format)
    if spec.scale_format == "fp32":
        scale = e8m0_decode_scale(scale) if spec.power_of_two_scale else scale.view(torch.float32)
    data = stored_codes(rows[:, :width].contiguous(), spec, dtype)
    return QuantizedTensor(torch.Size((len(rows), features)), dtype, spec, data, scale)


def stored_codes(codes: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    """uint8 codes [T, ``code_bytes``] as ``rowwise_data``: torch's FP8 dtype where it exists, else values in dtype."""
    fmt = FORMATS[spec.format]
    if fmt.name in DTYPES:
        return codes.view(DTYPES[fmt.name])
    if fmt.bits == 4:
        codes = unpacked(codes)
    return decode(codes, fmt).to(dtype)


def split_rows(x: QuantizedTensor, rows: Sequence[int]) -> list[QuantizedTensor]:
    """Parts of x [T, K] with these rows, rowwise; their sum is T, and no scale spans two rows."""
    data, scale = x.rowwise()
    assert scale is not None
    return [
        QuantizedTensor(part.shape, x.dtype, x.spec, part, of_part)
        for part, of_part in zip(data.split(list(rows)), scale.split(list(rows)), strict=True)
    ]
