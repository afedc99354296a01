"""Products of a group: rows of a, or of both operands, belong to matrices of one size; one ``gemm`` each."""

from collections.abc import Sequence

import torch

from megatron_lowprec.kernels.gemm.reference import gemm


def grouped_gemm(
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    rows: Sequence[int],
    *,
    alpha: float | torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``alpha * a @ b.T`` of each group's rows of a, [T, N], summed in fp32 and rounded once.

    Args:
        a: bf16 [T, K], as ``aligned_rows`` returns it, sorted by group.
        b: bf16 [N, K] of each group, of one layout: contiguous, or a transposed view of a contiguous matrix. N and K
            are multiples of 8, and each begins at a multiple of 16 bytes.
        rows: rows of each group; their sum is T.
        alpha: a number, or fp32 [groups] on the operands' device.
    """
    parts = zip(a.split(list(rows)), b, _alphas(alpha, rows), strict=True)
    return torch.cat([gemm(own, other, alpha=factor, out_dtype=out_dtype) for own, other, factor in parts])


def _alphas(alpha: float | torch.Tensor, rows: Sequence[int]) -> Sequence[float | torch.Tensor]:
    return [alpha] * len(rows) if isinstance(alpha, float) else list(alpha.unbind())


def grouped_wgrad_(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: Sequence[int],
    totals: Sequence[torch.Tensor],
    *,
    alpha: float | torch.Tensor,
    overwrite: Sequence[bool],
) -> None:
    """``total += alpha * a.T @ b`` over each group's rows, in fp32; written instead of added where ``overwrite``.

    Args:
        a: bf16 [T, M], as ``aligned_rows`` returns it, sorted by group; M and N are multiples of 8.
        b: bf16 [T, N], likewise.
        rows: rows of each group, also 0; their sum is T.
        alpha: as in ``grouped_gemm``.
        totals: [M, N] of each group, contiguous: fp32; or of any dtype, rounded once, where all are overwritten.
    """
    size = list(rows)
    parts = zip(a.split(size), b.split(size), totals, overwrite, _alphas(alpha, rows), strict=True)
    for own, other, total, writes, factor in parts:
        if total.dtype == torch.float32:
            gemm(own.t(), other.t(), alpha=factor, out_dtype=a.dtype, accumulate_into=total, overwrite=writes)
        else:
            assert writes
            total.copy_(gemm(own.t(), other.t(), alpha=factor, out_dtype=total.dtype))
