"""Block-scaled GEMMs by torch's scaled product, on GPUs of compute capability 10: MXFP8 of E4M3, and NVFP4.

MXFP4 needs a library that torch's wheels may lack.
"""

from typing import Any

import torch

from megatron_lowprec.kernels.mx_gemm.operand import TILE_BLOCKS, MxOperand

# values of torch.nn.functional.ScalingType and SwizzleType, which the operator takes as integers
_TENSOR, _BLOCKS, _TILES, _PLAIN = 0, {16: 2, 32: 3}, 1, 0
_CODES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2}
_SCALES = {16: torch.float8_e4m3fn, 32: torch.float8_e8m0fnu}


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
    """As the reference; cuBLAS sums in its order. It has no alpha for MXFP8, so that must be 1,
    and takes codes, so ``compute_dtype`` has no effect.

    torch's product cannot accumulate: adding is a separate pass.
    """
    assert alpha == 1.0 or a.block == 16, "torch's scaled product of MXFP8 has no alpha"
    a, b = a.checked(), b.checked()
    product_dtype = out_dtype if accumulate_into is None else torch.float32
    direct = accumulate_into if overwrite else None
    arguments: tuple[Any, ...] = (
        a.codes.view(_CODES[a.format]),
        b.codes.view(_CODES[b.format]).t(),
        *_scales(a, alpha),
        *_scales(b, 1.0),
        None,
        product_dtype,
        [],
        False,
    )
    # the operator behind torch.nn.functional.scaled_mm, which has no ``out``
    product = torch._scaled_mm_v2(*arguments) if direct is None else torch._scaled_mm_v2(*arguments, out=direct)
    return product if accumulate_into is None or direct is not None else accumulate_into.add_(product)


def mx_grouped_gemm(
    a: MxOperand, b: MxOperand, ends: torch.Tensor, *, alpha: float = 1.0, out_dtype: torch.dtype
) -> torch.Tensor:
    """As the reference; bf16 only. A library that torch's wheels may lack computes it."""
    a, b = a.checked(), b.checked()
    assert alpha == 1.0 or a.block == 16, "torch's scaled product of MXFP8 has no alpha"
    experts, columns = len(ends), -(-a.columns // (TILE_BLOCKS * a.block)) * TILE_BLOCKS
    product: torch.Tensor = torch._scaled_grouped_mm_v2(
        a.codes.view(_CODES[a.format]),
        b.codes.view(_CODES[b.format]).mT,
        *_scales(a._replace(scales=a.scales.view(-1, columns)), alpha, experts),
        *_scales(b._replace(scales=b.scales.view(experts, -1)), 1.0, experts),
        ends,
        None,
        out_dtype,
        [],
        False,
    )
    return product


def _scales(operand: MxOperand, alpha: float, count: int = 1) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Scales, their kinds and their layouts, as the operators take them; alpha multiplies those of tensors."""
    of_blocks = operand.scales.view(_SCALES[operand.block])
    if operand.block == 32:
        return [of_blocks], [_BLOCKS[32]], [_TILES]
    one = operand.tensor_scale
    above = torch.full((count,), alpha, device=of_blocks.device) if one is None else one * alpha
    return [of_blocks, above.reshape(count)], [_BLOCKS[16], _TENSOR], [_TILES, _PLAIN]
