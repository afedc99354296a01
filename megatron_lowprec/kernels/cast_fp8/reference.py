"""Rowwise and columnwise FP8 data and scales of a matrix, and its amax, in plain torch."""

import torch
from torch.nn.functional import pad

from megatron_lowprec.kernels.amax.reference import raise_to_amax
from megatron_lowprec.kernels.cast_fp8.prologue import (
    BiasGelu,
    BiasGeluGrad,
    CastPrologue,
    DropoutGrad,
    LayerNormOutput,
    QkvGrad,
    RMSNormOutput,
    Swiglu,
    SwigluGrad,
    prologue_of,
)
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Cast, Fp8Rule
from megatron_lowprec.kernels.dropout.reference import bias_dropout_add_backward
from megatron_lowprec.kernels.gelu.reference import bias_gelu, bias_gelu_backward
from megatron_lowprec.kernels.layernorm.reference import normalize
from megatron_lowprec.kernels.quantize.reference import encode, fp32_encode_scale, quantize_operand
from megatron_lowprec.kernels.swiglu.reference import swiglu, swiglu_backward
from megatron_lowprec.scaling import granularity_of

_Operand = tuple[torch.Tensor | None, torch.Tensor | None]


def entries(x: torch.Tensor | CastPrologue) -> torch.Tensor:
    """fp32 [M, N] of a matrix or a prologue, before rounding to the matrix's dtype."""
    match source := prologue_of(x):
        case BiasGelu():
            return bias_gelu(source.y.float(), source.bias)
        case BiasGeluGrad():
            return bias_gelu_backward(source.dout.float(), source.y.float(), source.bias)[0]
        case Swiglu():
            return swiglu(source.h.float())
        case SwigluGrad():
            return swiglu_backward(source.dout, source.h.float())
        case DropoutGrad():
            return bias_dropout_add_backward(source.dout.float(), source.p, source.key, None)[0]
        case LayerNormOutput():
            return normalize(source.input.float(), source.weight, source.bias, source.statistics)
        case RMSNormOutput():
            return normalize(source.input.float(), source.weight, None, source.statistics)
        case QkvGrad():
            groups = source.dq.shape[1] // source.widths[0]
            parts = [part.unflatten(1, (groups, -1)) for part in source.in_memory]
            return torch.cat(parts, dim=-1).flatten(1).float()
    return source.x.float()


def amax_of(x: torch.Tensor | CastPrologue, vectors: bool) -> torch.Tensor:
    """Amax of x [M, N], fp32 [1], or with ``vectors`` of each row and column, [M + N]; NaN propagates.

    Args:
        x: a matrix in memory; several tensors only without ``vectors``.
    """
    magnitude = entries(x).abs()
    return torch.cat((magnitude.amax(1), magnitude.amax(0))) if vectors else magnitude.amax().view(1)


def cast_fp8(
    x: torch.Tensor | CastPrologue,
    rule: Fp8Rule,
    *,
    rowwise: bool,
    columnwise: bool,
    amax: torch.Tensor | None = None,
    observed: torch.Tensor | None = None,
    sums: bool = False,
) -> Fp8Cast:
    """Rowwise data, columnwise data or both of x [M, N] in FP8.

    Args:
        x: bf16 or fp32, last dimension contiguous, not empty. N a multiple of 16; of 128 for rowwise 1x128 blocks and
            for 128x128 blocks. Any M: columns are zero-padded to the GEMM's multiple.
        amax: fp32 [1] for granularity "tensor", [M + N] for "row", from ``amax_of`` or a history; None computes it.
        observed: fp32 [1], raised to the amax of x, NaN as Inf.
        sums: also sum over M, for the gradient of a bias; for a computed source before rounding its entries.
    """
    source = prologue_of(x)
    exact = entries(source)
    matrix = exact.to(source.dtype)
    M, N = matrix.shape
    if observed is not None:
        raise_to_amax(observed, matrix.nan_to_num(torch.inf, posinf=torch.inf, neginf=-torch.inf))
    if amax is None and rule.granularity in ("tensor", "row"):
        amax = amax_of(matrix, vectors=rule.granularity == "row")
    row_amax, column_amax = (amax, amax) if amax is None or rule.granularity == "tensor" else amax.split((M, N))
    unit = 128 if granularity_of(rule.granularity).block else 16
    height = -M % unit if rule.granularity == "1x128" else 0
    by_rows: _Operand = (None, None)
    by_columns: _Operand = (None, None)
    if rowwise:
        by_rows = _operand(pad(matrix, (0, 0, 0, height)), rule, row_amax)
    if columnwise:
        by_columns = _operand(pad(matrix.t(), (0, -M % unit)), rule, column_amax)
    return Fp8Cast(
        by_rows[0], by_rows[1], by_columns[0], by_columns[1], exact.sum(0).to(source.dtype) if sums else None
    )


def _operand(matrix: torch.Tensor, rule: Fp8Rule, amax: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 data of [R, K], contracted dimension last, and decode scales in the layout of ``Fp8Cast``."""
    encode_scale = None
    if amax is not None:
        encode_scale = fp32_encode_scale(amax[:, None], rule.fmt, rule.scale_rule, rule.amax_floor, rule.margin)
    elements, scale = quantize_operand(
        matrix,
        rule.fmt,
        granularity_of(rule.granularity).block_of(*matrix.shape),
        scale_format="fp32",
        scale_rule=rule.scale_rule,
        amax_floor=rule.amax_floor,
        encode_scale=encode_scale,
    )
    if rule.granularity == "1x128":
        scale = scale.t().contiguous().t()
    elif rule.granularity == "128x128":
        scale = pad(scale, (0, -scale.shape[1] % 4))
    return encode(elements, rule.fmt).view(rule.dtype), scale
