"""Tiles of products and operands that the check at start compares, so that it needs little memory.

These are the first, a middle and the last tile of 128 rows of each operand, and the tiles of the product where they
meet. Each row has all of K's codes and scales. A fault of layout, order or scale is in each tile, one of the edge in
the last.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.mx_gemm import reference
from megatron_lowprec.kernels.mx_gemm.operand import TILE_ROWS, MxOperand, from_tiles
from megatron_lowprec.kernels.quantize.reference import block_amax
from megatron_lowprec.linear.backends.blackwell_mx.start_check import Check, of_frequencies, of_operand, of_product
from megatron_lowprec.quantization.quantizer import quantize_by_reference
from megatron_lowprec.quantization.random_stream import RandomStream
from megatron_lowprec.quantization.tensor import as_numbers
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.schema import QuantSpec

_AT_ONCE = 8 * TILE_ROWS  # rows whose amax is found in fp32


def sampled_rows(rows: int) -> list[slice]:
    """The compared rows of an operand with ``rows`` rows."""
    tiles = -(-rows // TILE_ROWS)
    return [slice(one * TILE_ROWS, min(rows, (one + 1) * TILE_ROWS)) for one in sorted({0, tiles // 2, tiles - 1})]


def sampled_operand(operand: MxOperand) -> MxOperand:
    """The compared rows of an operand; only the last tile may have fewer than 128."""
    rows = operand.checked().codes.shape[0]
    tiles = operand.scales.view(-(-rows // TILE_ROWS), -1)
    at = sampled_rows(rows)
    codes = torch.cat([operand.codes[one] for one in at])
    return operand._replace(codes=codes, scales=torch.cat([tiles[one.start // TILE_ROWS] for one in at]))


def sampled_product(matrix: torch.Tensor) -> torch.Tensor:
    """A copy of the compared entries of a product [M, N]."""
    rows, columns = map(sampled_rows, matrix.shape)
    return torch.cat([torch.cat([matrix[row, column] for column in columns], 1) for row in rows])


def product_check(
    what: str, got: torch.Tensor, operands: tuple[MxOperand, MxOperand], alpha: float, before: torch.Tensor | None
) -> Check:
    """A native product beside that of the model.

    Args:
        before: compared entries of what it was added to; None for nothing.
    """
    left, right = map(sampled_operand, operands)
    addend = 0.0 if before is None else float(before.abs().max())
    want = reference.mx_gemm(left, right, alpha=alpha, out_dtype=got.dtype, accumulate_into=before)
    sums = reference.mx_gemm(magnitudes(left), magnitudes(right), alpha=alpha, out_dtype=torch.float32)
    return of_product(what, sampled_product(got), want, sums, left.columns, addend)


def magnitudes(operand: MxOperand) -> MxOperand:
    """The operand without its entries' signs."""
    return operand._replace(codes=operand.codes & (0x77 if operand.format == "e2m1" else 0x7F))


def operand_check(
    what: str,
    operand: MxOperand,
    matrix: torch.Tensor,
    spec: QuantSpec,
    random: RandomStream,
    transform: Transform | None,
    tensor_amax: torch.Tensor | None,
    shares_amax: bool,
) -> Check:
    """An operand beside the quantizer's reference, and stochastic rounding beside its fractions.

    Args:
        matrix: [R, K] that was quantized, contracted dimension last, any strides.
        tensor_amax: of delayed scaling.
        shares_amax: the tensor's amax is over ranks, so that only frequencies are compared.
    """
    sample, at = sampled_operand(operand), sampled_rows(matrix.shape[0])
    found, group = reference.values(sample), None if transform is None else transform.block
    parts = [matrix[rows].float() if transform is None else transform.apply(matrix[rows]) for rows in at]
    check = Check(what, 0.0)
    if not shares_amax:
        if tensor_amax is None and spec.tensor_scale is not None:
            tensor_amax = _amax(matrix, transform)
        made = [
            quantize_by_reference(
                part, spec, _moved(random, rows.start), tensor_amax=tensor_amax, group=group, dequantize=True
            )
            for part, rows in zip(parts, at, strict=True)
        ]
        want = torch.cat([one.data for one in made])
        check = of_operand(what, found.to(want.dtype), want)
        above = made[0].tensor_scale
        if not check.fault and above is not None and operand.tensor_scale is not None:
            of_tensor = of_operand(f"{what}, the tensor's scale", operand.tensor_scale.view(-1), above.view(-1))
            check = of_tensor if of_tensor.fault else check
    if not check.fault and spec.rounding == "stochastic" and spec.scale.four_over_six is None:
        check = of_frequencies(what, found, *_in_steps(sample, spec, torch.cat(parts)), spec.random_bits)
    return check


def _moved(random: RandomStream, first: int) -> RandomStream:
    """The stream of a tensor's rows from ``first`` on."""
    start, offset, _ = random.row_span
    return replace(random, row_span=random.row_span._replace(start=start + first, gate_offset=offset - first))


def _amax(matrix: torch.Tensor, transform: Transform | None) -> torch.Tensor:
    """fp32 [1, 1] of the transformed matrix, with few rows in fp32 at a time."""
    found = []
    for part in matrix.split(_AT_ONCE):
        part = part.float() if transform is None else transform.apply(part)
        found.append(block_amax(part, (part.shape[0], part.shape[1])))
    return block_amax(torch.cat(found), (len(found), 1))


def _in_steps(operand: MxOperand, spec: QuantSpec, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries in units of their decoded codes, and the steps of the grid there; 0 for entries that may saturate."""
    fmt, rows, blocks = FORMATS[spec.format], len(exact), -(-operand.columns // operand.block)
    scales = as_numbers(from_tiles(operand.scales, rows, blocks), spec.scale_format)
    scale = scales.repeat_interleave(operand.block, 1)[:, : operand.columns]
    exact = exact[:, : operand.columns] * spec.headroom
    exact = exact if operand.tensor_scale is None else exact / operand.tensor_scale
    scaled = (exact / scale).abs().nan_to_num(nan=torch.inf)
    exponent = torch.frexp(scaled.clamp(max=fmt.max)).exponent - 1
    step = torch.exp2((exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits).float())
    return exact, torch.where(scaled <= fmt.max / 1.5, step * scale, 0.0)
