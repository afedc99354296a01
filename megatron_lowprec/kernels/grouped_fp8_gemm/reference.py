"""FP8 products of a group: scales of matrices, of their rows, or of 1x128 and 128x128 blocks.

With blocks, partial sums over 128 are scaled and added in fp32. Rows of a group's tokens are padded with zeros to whole
blocks of 128, so that no block has tokens of two groups.
"""

from collections.abc import Sequence

import torch

from megatron_lowprec.kernels.gemm.reference import gemm
from megatron_lowprec.kernels.grouped_cast_fp8.reference import BLOCK, padded_rows


def pad_groups(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """x [T, N], sorted by group, with each group's rows padded by zeros to whole blocks; x itself if none is padded.

    Args:
        rows: rows of each group; their sum is T.
    """
    whole = padded_rows(rows)
    if whole == list(rows):
        return x
    parts = zip(x.split(list(rows)), rows, whole, strict=True)
    return torch.cat([torch.nn.functional.pad(part, (0, 0, 0, height - count)) for part, count, height in parts])


def grouped_fp8_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: Sequence[torch.Tensor],
    b_scale: torch.Tensor,
    rows: Sequence[int],
    *,
    granularity: str,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """``a @ b.T`` of each group's rows of a, [T, N] without padding.

    Args:
        a: FP8 [padded T, K], rows of ``pad_groups``; K a multiple of 16, of 128 with blocks.
        a_scale: fp32 decode scales: "tensor" [groups]; "row" [padded T, 1]; "1x128" [padded T, K / 128], any strides.
        b: FP8 [N, K] of each group, of equal strides, the last dimension contiguous; addresses of rows are multiples of
            16 bytes.
        b_scale: fp32 decode scales: [groups]; for "row" [groups, N]; for "1x128" those of 128x128 blocks, [groups,
            N / 128, K / 128 or more], the last contiguous.
        rows: rows of each group before padding; their sum is T.
        granularity: "tensor", "row" or "1x128".
        fast_accumulation: keep sums in the tensor cores' accumulator, instead of promoting them to fp32 every 128
            terms; blocks are always promoted.
    """
    own, products = padded_rows(rows), []
    blocks = granularity == "1x128"
    scales = a_scale.view(-1, 1, 1).unbind() if granularity == "tensor" else a_scale.split(own)
    for i, (data, scale) in enumerate(zip(a.split(own), scales, strict=True)):
        product = gemm(
            data.float(),
            b[i].float(),
            a_scale=scale,
            b_scale=b_scale[i, :, : a_scale.shape[1]] if blocks else b_scale[i].view(-1, 1),
            a_block=(1, BLOCK),
            b_block=(BLOCK if blocks else 1, BLOCK),
            out_dtype=out_dtype,
        )
        products.append(product[: rows[i]])
    return torch.cat(products)


def grouped_fp8_wgrad_(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    rows: Sequence[int],
    totals: Sequence[torch.Tensor],
    *,
    granularity: str,
    overwrite: Sequence[bool],
    fast_accumulation: bool = False,
) -> None:
    """``total += a @ b.T`` over each group's columns, in fp32; written instead of added where ``overwrite``.

    Args:
        a, b: FP8 [M, padded T] and [N, padded T], transposed rows of ``pad_groups``.
        a_scale, b_scale: fp32 decode scales: "tensor" [groups]; "row" [groups, M] and [groups, N]; "1x128" [M,
            padded T / 128] and [N, padded T / 128].
        rows: columns of each group before padding.
        totals: [M, N] of each group, contiguous: fp32; or of any dtype, rounded once, where all are overwritten.
        granularity, fast_accumulation: as in ``grouped_fp8_gemm``.
    """
    first = 0
    for i, (height, total, writes) in enumerate(zip(padded_rows(rows), totals, overwrite, strict=True)):
        columns = slice(first, first + height)
        blocks = slice(first // BLOCK, (first + height) // BLOCK)
        first += height
        product = torch.zeros(total.shape, device=total.device)
        if height:
            product = gemm(
                a[:, columns].float(),
                b[:, columns].float(),
                a_scale=a_scale[:, blocks] if granularity == "1x128" else a_scale[i].view(-1, 1),
                b_scale=b_scale[:, blocks] if granularity == "1x128" else b_scale[i].view(-1, 1),
                a_block=(1, BLOCK),
                b_block=(1, BLOCK),
                out_dtype=torch.float32,
            )
        total.copy_(product) if writes else total.add_(product)
