"""GEMM that contracts the last dimension of both operands; scales and alpha multiply the fp32 accumulator."""

from collections.abc import Callable
from functools import lru_cache

import torch

from megatron_lowprec.kernels.gemm import device_alpha

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""[M, K], [N, K] elements -> fp32 [M, N], their product contracted over K."""


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    a_block: tuple[int, int] = (1, 1),
    b_block: tuple[int, int] = (1, 1),
    alpha: float | torch.Tensor = 1.0,
    out_dtype: torch.dtype,
    accumulate_into: torch.Tensor | None = None,
    overwrite: bool = False,
    product: Product | None = None,
) -> torch.Tensor:
    """``alpha * (a * a_scale) @ (b * b_scale).T``, summed in fp32 (fp64 for fp64 operands) and rounded once.

    Without scales it is one matrix product. Row and tensor scales multiply the final sum. Scales of blocks along K
    multiply each partial sum over a block, which is then added in fp32: DeepSeek-V3's promotion (arXiv 2412.19437,
    section 3.3.2).

    Args:
        a: [M, K] in the compute dtype.
        b: [N, K] in the compute dtype.
        a_scale, b_scale: None, or fp32 decode scales: [1, 1], [R, 1], or [ceil(R / rows), ceil(K / columns)] of blocks.
        a_block, b_block: (rows, columns) that share a scale; ignored without scales.
        alpha: multiplies the fp32 sum; a number, or fp32 of one entry on the operands' device.
        out_dtype: dtype of the result.
        accumulate_into: fp32 [M, N]; add the product to it in fp32 and return it.
        overwrite: write the product to ``accumulate_into``, which is not read.
        product: sums each slice of K with constant scales; None for fp32 sums in torch's order.

    Raises:
        ValueError: the operands differ in K, or their blocks along it.
    """
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"both operands must have equal columns, got {a.shape[1]} and {b.shape[1]}")
    if a_scale is None and b_scale is None and product is None and not isinstance(alpha, torch.Tensor):
        if accumulate_into is not None:
            return _accumulate(a, b, alpha, accumulate_into, overwrite)
        return _product(a, b, alpha, out_dtype)
    stored = out_dtype if accumulate_into is None else accumulate_into.dtype
    if a_scale is None and b_scale is None and product is None and device_alpha.takes(a, b, stored):
        assert isinstance(alpha, torch.Tensor)
        if accumulate_into is not None:
            return device_alpha.product_(a, b, alpha, accumulate_into, add=not overwrite)
        return device_alpha.product_(a, b, alpha, a.new_empty(len(a), len(b), dtype=out_dtype), add=False)
    total: torch.Tensor | None = None
    sides = ((a, a_scale, a_block, 0), (b, b_scale, b_block, 1))
    for k in _k_slices(a.shape[1], (a_scale, a_block), (b_scale, b_block)):
        part = product(a[:, k], b[:, k]) if product else _product(a[:, k], b[:, k], 1.0, _sum_dtype(a))
        for data, scale, block, dim in sides:
            if scale is not None:
                part = part * _row_scale(scale, block, data.shape[0], k).unsqueeze(1 - dim)
        total = part if total is None else total + part
    assert total is not None
    if isinstance(alpha, torch.Tensor) or alpha != 1.0:
        total = total * alpha  # not in place: a selective checkpoint may keep the result of aten.mm
    if accumulate_into is None:
        return total.to(out_dtype)
    return accumulate_into.copy_(total) if overwrite else accumulate_into.add_(total)


def _product(a: torch.Tensor, b: torch.Tensor, alpha: float, out_dtype: torch.dtype) -> torch.Tensor:
    """``alpha * a @ b.T``; alpha multiplies the fp32 sum."""
    if alpha == 1.0 and a.dtype == out_dtype:
        return torch.mm(a, b.t())
    if a.is_cuda and a.dtype == out_dtype:
        return torch.addmm(_ignored(a.device, a.dtype), a, b.t(), beta=0.0, alpha=alpha)
    if a.is_cuda and a.dtype != torch.float32 and out_dtype == torch.float32:
        product = torch.mm(a, b.t(), out_dtype=torch.float32)
    else:  # on a CPU torch has no GEMM of narrow operands with an fp32 result
        product = torch.mm(a.to(_sum_dtype(a)), b.to(_sum_dtype(b)).t())
    return (product * alpha if alpha != 1.0 else product).to(out_dtype)


def _sum_dtype(elements: torch.Tensor) -> torch.dtype:
    return torch.promote_types(elements.dtype, torch.float32)


@lru_cache(maxsize=16)
def _ignored(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Unused addend of addmm with beta 0."""
    return torch.zeros(1, device=device, dtype=dtype)


def _accumulate(a: torch.Tensor, b: torch.Tensor, alpha: float, total: torch.Tensor, overwrite: bool) -> torch.Tensor:
    if a.is_cuda and a.dtype != torch.float32:
        if overwrite and alpha == 1.0:
            return torch.mm(a, b.t(), out_dtype=torch.float32, out=total)
        return torch.addmm(total, a, b.t(), beta=not overwrite, alpha=alpha, out_dtype=torch.float32, out=total)
    product = _product(a, b, alpha, torch.float32)
    return total.copy_(product) if overwrite else total.add_(product)


def _k_slices(length: int, *sides: tuple[torch.Tensor | None, tuple[int, int]]) -> list[slice]:
    """Slices of K with constant scales; ValueError if the operands' blocks differ."""
    steps = {block[1] for scale, block in sides if scale is not None and scale.shape[1] > 1}
    if len(steps) > 1:
        raise ValueError(f"both operands must have equal blocks along the contracted dimension, got {sorted(steps)}")
    if not steps:  # K may be 0: an expert without tokens
        return [slice(0, length)]
    step = steps.pop()
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _row_scale(scale: torch.Tensor, block: tuple[int, int], rows: int, k: slice) -> torch.Tensor:
    """Scale of each row of an operand in slice ``k`` of K: [R] or [1]."""
    column = scale[:, k.start // block[1] if scale.shape[1] > 1 else 0]
    whole = column.numel() in (1, rows) and block[0] in (1, rows)
    return column if whole else column.repeat_interleave(block[0])[:rows]
