"""FP8 GEMMs on tensor cores, by torch's scaled GEMM."""

from typing import Any

import torch

from megatron_lowprec.kernels.fp8_accumulate import cublaslt as fp8_accumulate

ROW_MULTIPLE = 16
"""The contracted dimension and the columns of the result must be multiples of this."""

SCALE_ALIGNMENT = 16
"""Bytes; cuBLAS refuses scales of rows or blocks at other addresses, as those of an expert in the middle may be."""

# values of torch.nn.functional.ScalingType, which the operator takes as integers
_SCALINGS = {"tensor": 0, "row": 1, "1x128": 4, "128x128": 5}


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    a_granularity: str,
    b_granularity: str,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    bias: torch.Tensor | None = None,
    accumulate_into: torch.Tensor | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """``(a * a_scale) @ (b * b_scale).T``, summed by the tensor cores.

    Args:
        a: FP8 [M, K], row-major; M a multiple of 16 with ``accumulate_into`` and 1x128 blocks.
        b: FP8 [N, K], row-major; K and N multiples of 16.
        a_scale, b_scale: fp32 decode scales: [1, 1] for "tensor", [R, 1] for "row", [R, K / 128] with K outermost in
            memory for 1x128 blocks, [R / 128, K / 128 in multiples of 4] for 128x128 blocks.
        a_granularity, b_granularity: "tensor", "row", "1x128" or "128x128".
        out_dtype: bf16; or fp32 if no operand has granularity "row".
        fast_accumulation: keep sums in the tensor cores' accumulator, of about 14 bits on Hopper, instead of promoting
            them to fp32 every 128 terms; 1x128 blocks are always promoted.
        bias: bf16 [N], added before the result is rounded to bf16.
        accumulate_into: fp32 [M, N]; add the product to it in fp32 and return it. torch's scaled GEMM cannot
            accumulate, so this is a separate pass, unless ``kernels.fp8_accumulate`` is enabled; with row scales the
            product is first rounded to bf16.
        overwrite: write the product to ``accumulate_into`` instead of adding.
    """
    if (
        accumulate_into is not None
        and not overwrite
        and fp8_accumulate.takes(a, b, accumulate_into, a_granularity, b_granularity)
    ):
        return fp8_accumulate.add_product_(a, b, a_scale, b_scale, accumulate_into, fast_accumulation=fast_accumulation)
    if (a_granularity == "row") != (b_granularity == "row"):  # the operator takes row scales of both or of neither
        a_scale, b_scale = a_scale.expand(a.shape[0], 1).contiguous(), b_scale.expand(b.shape[0], 1).contiguous()
        a_granularity = b_granularity = "row"
    by_rows = a_granularity == "row"
    product_dtype, out = out_dtype, None
    if accumulate_into is not None:
        product_dtype = torch.bfloat16 if by_rows else torch.float32
        out = accumulate_into if overwrite and not by_rows else None
    if accumulate_into is None and out_dtype == torch.bfloat16 and a_granularity in ("tensor", "row"):
        # the older operator, of the same bits: Inductor knows it on every torch, and so plans memory of its result
        second_scale = b_scale.t() if by_rows else b_scale
        scaled: torch.Tensor = torch._scaled_mm(
            a, b.t(), a_scale, second_scale, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accumulation
        )
        return scaled
    # the operator behind torch.nn.functional.scaled_mm, which has no ``out``
    arguments: tuple[Any, ...] = (
        a,
        b.t(),
        [a_scale.t() if a_granularity == "128x128" else a_scale],
        [_SCALINGS[a_granularity]],
        [],
        [b_scale.t() if b_granularity in ("128x128", "row") else b_scale],
        [_SCALINGS[b_granularity]],
        [],
        bias,
        product_dtype,
        [],
        fast_accumulation and a_granularity in ("tensor", "row"),
    )
    product = torch._scaled_mm_v2(*arguments) if out is None else torch._scaled_mm_v2(*arguments, out=out)
    if accumulate_into is None or out is not None:
        return product
    return accumulate_into.copy_(product) if overwrite else accumulate_into.add_(product)
