"""Products of two operands along their last dimension, with scales and alpha applied to the fp32 accumulator."""

from functools import lru_cache
from typing import NamedTuple

import torch


class Operand(NamedTuple):
    """One side of a product.

    Attributes:
        elements: [R, K] in the compute dtype.
        scale: None, or fp32 decode scales: [1, 1], [R, 1], or [ceil(R / rows), ceil(K / columns)] of blocks.
        block: (rows, columns) that share a scale; ignored without scales.
    """

    elements: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (1, 1)


def contract(
    a: Operand,
    b: Operand,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype,
    accumulate_into: torch.Tensor | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """``alpha * (a * scale) @ (b * scale).T``, summed in fp32 (of fp64 operands in fp64) and rounded once.

    Without scales it is one matrix product. Scales of whole rows multiply the finished sum; scales of blocks along K
    multiply each partial sum over a block, which is then added in fp32: DeepSeek-V3's promotion (arXiv 2412.19437,
    section 3.3.2).

    Args:
        a: [M, K].
        b: [N, K].
        alpha: multiplies the fp32 sum.
        out_dtype: dtype of the result.
        accumulate_into: fp32 [M, N]; the product is added to it in fp32 and it is returned.
        overwrite: take ``accumulate_into`` as zeros, unread.
    """
    if a.scale is None and b.scale is None:
        if accumulate_into is not None:
            return _accumulate(a.elements, b.elements, alpha, accumulate_into, overwrite)
        return _product(a.elements, b.elements, alpha, out_dtype)
    total: torch.Tensor | None = None
    for k in _k_slices(a, b):
        part = _product(a.elements[:, k], b.elements[:, k], 1.0, _sum_dtype(a.elements))
        for operand, dim in ((a, 0), (b, 1)):
            if operand.scale is not None:
                part = part * _row_scale(operand, k).unsqueeze(1 - dim)
        total = part if total is None else total + part
    assert total is not None
    if alpha != 1.0:
        total = total * alpha
    if accumulate_into is None:
        return total.to(out_dtype)
    return accumulate_into.copy_(total) if overwrite else accumulate_into.add_(total)


def _product(a: torch.Tensor, b: torch.Tensor, alpha: float, out_dtype: torch.dtype) -> torch.Tensor:
    """``alpha * a @ b.T`` with alpha on the fp32 sum."""
    if alpha == 1.0 and a.dtype == out_dtype:
        return torch.mm(a, b.t())
    if a.is_cuda and a.dtype == out_dtype:
        return torch.addmm(_ignored(a.device, a.dtype), a, b.t(), beta=0.0, alpha=alpha)
    if a.is_cuda and a.dtype != torch.float32 and out_dtype == torch.float32:
        product = torch.mm(a, b.t(), out_dtype=torch.float32)
    else:  # torch has no product of narrow operands with an fp32 result on a CPU
        product = torch.mm(a.to(_sum_dtype(a)), b.to(_sum_dtype(b)).t())
    return (product * alpha if alpha != 1.0 else product).to(out_dtype)


def _sum_dtype(elements: torch.Tensor) -> torch.dtype:
    return torch.promote_types(elements.dtype, torch.float32)


@lru_cache(maxsize=16)
def _ignored(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What addmm would add, were beta not 0."""
    return torch.zeros(1, device=device, dtype=dtype)


def _accumulate(a: torch.Tensor, b: torch.Tensor, alpha: float, total: torch.Tensor, overwrite: bool) -> torch.Tensor:
    if a.is_cuda and a.dtype != torch.float32:
        if overwrite and alpha == 1.0:
            return torch.mm(a, b.t(), out_dtype=torch.float32, out=total)
        return torch.addmm(total, a, b.t(), beta=not overwrite, alpha=alpha, out_dtype=torch.float32, out=total)
    product = _product(a, b, alpha, torch.float32)
    return total.copy_(product) if overwrite else total.add_(product)


def _k_slices(a: Operand, b: Operand) -> list[slice]:
    """Parts of K over which no scale changes."""
    length = a.elements.shape[1]
    steps = {operand.block[1] for operand in (a, b) if operand.scale is not None and operand.scale.shape[1] > 1}
    if len(steps) > 1:
        raise ValueError(f"both operands must have equal blocks along the contracted dimension, got {sorted(steps)}")
    step = steps.pop() if steps else length
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _row_scale(operand: Operand, k: slice) -> torch.Tensor:
    """The scale of each row of the operand over that part of K: [R] or [1]."""
    assert operand.scale is not None
    column = operand.scale[:, k.start // operand.block[1] if operand.scale.shape[1] > 1 else 0]
    rows = operand.elements.shape[0]
    return (
        column
        if column.numel() in (1, rows) and operand.block[0] in (1, rows)
        else column.repeat_interleave(operand.block[0])[:rows]
    )
