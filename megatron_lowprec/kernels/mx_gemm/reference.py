"""A model of Blackwell's block-scaled GEMM that reads bytes by address; it shares no code with what writes them.

Values of bytes are those of torch's FP8 dtypes and of a table of E2M1. They are rounded to the compute dtype, in which
the emulated backend holds the same values, and multiplied by ``gemm/reference.py``: products then have its bits,
because sums have its order.
"""

import math
from collections.abc import Iterator

import torch

from megatron_lowprec.kernels.gemm.reference import gemm
from megatron_lowprec.kernels.mx_gemm.operand import MxOperand

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SCALES = {32: torch.float8_e8m0fnu, 16: torch.float8_e4m3fn}


def mx_gemm(
    a: MxOperand,
    b: MxOperand,
    *,
    alpha: float = 1.0,
    compute_dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype,
    accumulate_into: torch.Tensor | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """``alpha * a @ b.T`` of decoded operands, summed in fp32, times their tensor scales, and rounded once.

    Args:
        a: [M, K]; b: [N, K].
        compute_dtype: in which decoded entries are multiplied; bf16 holds those of all formats here exactly, but for
            numbers below its range.
        out_dtype: dtype of the result.
        accumulate_into: fp32 [M, N]; add the product to it in fp32 and return it.
        overwrite: write the product to ``accumulate_into``, which is not read.
    """
    of_tensors = [each.tensor_scale for each in (a, b) if each.tensor_scale is not None]
    return gemm(
        values(a).to(compute_dtype),
        values(b).to(compute_dtype),
        alpha=math.prod(of_tensors, start=alpha),
        out_dtype=out_dtype,
        accumulate_into=accumulate_into,
        overwrite=overwrite,
    )


def mx_grouped_gemm(
    a: MxOperand, b: MxOperand, ends: torch.Tensor, *, alpha: float = 1.0, out_dtype: torch.dtype
) -> torch.Tensor:
    """``mx_gemm`` of each expert, [T, N].

    Args:
        a: codes [T, P], one expert's rows after another's, tiles of scales of each, tensor scales [experts].
        b: codes [experts, N, P], tiles of scales of each, tensor scales [experts].
        ends: int32 [experts], where the rows of each expert end.
    """
    return torch.cat([mx_gemm(*one, alpha=alpha, out_dtype=out_dtype) for one in experts(a, b, ends)])


def experts(a: MxOperand, b: MxOperand, ends: torch.Tensor) -> Iterator[tuple[MxOperand, MxOperand]]:
    """Both operands of each expert, by the addresses at which those of ``mx_grouped_gemm`` lie."""
    (count, N, pitch), bytes_of_b = b.codes.shape, b.scales.numel() // len(ends)
    codes = a.codes.as_strided(a.codes.shape, (pitch, 1))
    weights = b.codes.as_strided((count, N, pitch), (N * pitch, pitch, 1))
    first = scale = 0
    for expert, end in enumerate(ends.tolist()):
        bytes_of_a = -(-(end - first) // 128) * -(-a.columns // (4 * a.block)) * 512
        left = a._replace(codes=codes[first:end], scales=a.scales[scale : scale + bytes_of_a])
        scales = b.scales[expert * bytes_of_b : (expert + 1) * bytes_of_b]
        right = b._replace(codes=weights[expert], scales=scales)
        of_tensors = [None if one.tensor_scale is None else one.tensor_scale[expert] for one in (a, b)]
        yield left._replace(tensor_scale=of_tensors[0]), right._replace(tensor_scale=of_tensors[1])
        first, scale = end, scale + bytes_of_a


def values(operand: MxOperand) -> torch.Tensor:
    """fp32 [R, K] that an operand's bytes stand for, without the tensor's scale."""
    codes, scales, fmt, block, columns, _ = operand
    (rows, pitch), device = codes.shape, codes.device
    # from the first address on: a GEMM knows the bytes of a row, and no other stride
    codes, scales = (each.as_strided((each.numel(),), (1,)) for each in (codes, scales))
    k, r = torch.arange(columns, device=device), torch.arange(rows, device=device).unsqueeze(1)
    if fmt == "e2m1":
        byte = codes[r * pitch + k // 2].to(torch.int64)
        elements = torch.tensor(_E2M1, device=device)[torch.where(k % 2 == 0, byte % 16, byte // 16)]
    else:
        elements = codes.view(_DTYPES[fmt]).to(torch.float32)[r * pitch + k]
    tiles_across = -(-columns // (4 * block))
    tile = (r // 128) * tiles_across + k // (4 * block)
    address = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + k // block % 4
    return elements * scales.view(_SCALES[block]).to(torch.float32)[address]
