"""FP8 products on tensor cores by torch's scaled matmul, and the operands they take."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

ROW_MULTIPLE = 16
"""The contracted dimension and the columns of a result must be multiples of this."""
_BLOCK = 128

# torch.nn.functional.ScalingType, whose members the operator takes as numbers
_SCALINGS = {"tensor": 0, "row": 1, "1x128": 4, "128x128": 5}


class ScaledMatrix(NamedTuple):
    """One side of a native product.

    Attributes:
        elements: FP8 [R, K], row-major, contracted dimension last; R may be padded with rows of zeros.
        scale: fp32 decode scales as the product reads them: [1], [R], 1x128 blocks [K / 128, R], 128x128 blocks
            [R / 128, K / 128 rounded up to a multiple of 4].
        granularity: "tensor", "row", "1x128" or "128x128".
        rows: rows that are not padding.
    """

    elements: torch.Tensor
    scale: torch.Tensor
    granularity: str
    rows: int

    @staticmethod
    def empty(
        height: int, length: int, dtype: torch.dtype, granularity: str, device: torch.device, rows: int
    ) -> "ScaledMatrix":
        """Room for [height, length], of which the first ``rows`` are no padding."""
        elements = torch.empty((height, length), dtype=dtype, device=device)
        make: Callable[..., torch.Tensor] = torch.empty
        if granularity == "tensor":
            size: tuple[int, ...] = (1,)
        elif granularity == "row":
            size = (height,)
        elif granularity == "1x128":
            size = (-(-length // _BLOCK), height)
        else:
            blocks = -(-length // _BLOCK)
            size = (-(-height // _BLOCK), -(-blocks // 4) * 4)
            # what pads a row of scales is not used, but should not be NaN by chance
            make = torch.zeros if blocks % 4 else make
        return ScaledMatrix(elements, make(size, dtype=torch.float32, device=device), granularity, rows)

    def decode_scale(self) -> torch.Tensor:
        """fp32 decode scales [1, 1], [R, 1], or [ceil(R / rows), ceil(K / columns)] of tiles, as the reference has."""
        rows, length = self.elements.shape
        if self.granularity == "tensor":
            return self.scale.view(1, 1)
        if self.granularity == "row":
            return self.scale.view(rows, 1)
        return self.scale.t() if self.granularity == "1x128" else self.scale[:, : -(-length // _BLOCK)]


def scaled_product(
    a: ScaledMatrix,
    b: ScaledMatrix,
    *,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: torch.Tensor | None = None,
    accumulate_into: torch.Tensor | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """``(a * scale) @ (b * scale).T``, summed by the tensor cores.

    Args:
        a: [M, K].
        b: [N, K]; K and N multiples of 16; M too, with ``accumulate_into`` and 1x128 blocks.
        out_dtype: bf16, or fp32 where no operand has a scale a row.
        fast_accumulation: let the tensor cores keep sums in their own accumulator, of about 14 bits on Hopper, in place
            of promoting them to fp32 every 128 terms; 1x128 blocks are always promoted.
        bias: bf16 [N], added before the result is rounded to bf16.
        accumulate_into: fp32 [M, N]; the product is added to it in fp32 and it is returned. torch's scaled product
            adds to nothing, so this is a pass of its own; with scales a row the product is rounded to bf16 before.
        overwrite: put the product into ``accumulate_into`` without adding.
    """
    if (a.granularity == "row") != (b.granularity == "row"):
        a, b = _by_rows(a), _by_rows(b)
    if accumulate_into is None:
        product = _scaled_mm(a, b, out_dtype, fast_accumulation, bias)
        return product if a.rows == a.elements.shape[0] else product[: a.rows]
    if a.granularity == "row":
        product = _scaled_mm(a, b, torch.bfloat16, fast_accumulation)
        return accumulate_into.copy_(product) if overwrite else accumulate_into.add_(product)
    if overwrite:
        return _scaled_mm(a, b, torch.float32, fast_accumulation, out=accumulate_into)
    return accumulate_into.add_(_scaled_mm(a, b, torch.float32, fast_accumulation))


def _scaled_mm(
    a: ScaledMatrix,
    b: ScaledMatrix,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    fast = fast_accumulation and a.granularity in ("tensor", "row")
    scales = (_scale_argument(a, 0), _scale_argument(b, 1))
    # the operator behind torch.nn.functional.scaled_mm, which has no ``out``
    arguments: tuple[Any, ...] = (
        a.elements,
        b.elements.t(),
        [scales[0]],
        [_SCALINGS[a.granularity]],
        [],
        [scales[1]],
        [_SCALINGS[b.granularity]],
        [],
        bias,
        out_dtype,
        [],
        fast,
    )
    if out is not None:
        return torch._scaled_mm_v2(*arguments, out=out)
    return torch._scaled_mm_v2(*arguments)


def _by_rows(operand: ScaledMatrix) -> ScaledMatrix:
    """A scale of the tensor as one for each row."""
    if operand.granularity == "row":
        return operand
    return operand._replace(scale=operand.scale.expand(operand.elements.shape[0]).contiguous(), granularity="row")


def _scale_argument(operand: ScaledMatrix, side: int) -> torch.Tensor:
    if operand.granularity == "row":
        return operand.scale.unsqueeze(1 - side)
    return operand.scale if operand.granularity == "tensor" else operand.scale.t()
