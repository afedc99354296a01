"""MX quantization by one kernel, or by two: rowwise, columnwise or both."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron_lowprec.kernels.launch import EMPTY, MOST_LAYOUTS, Specialized
from megatron_lowprec.kernels.philox.reference import WHOLE, ShardSlice
from megatron_lowprec.kernels.quantize.rule import CodedMatrix, Direction, MxCast, MxRule, converts_fp8
from megatron_lowprec.kernels.quantize.tilings import LONGEST_FUSED, Tiling
from megatron_lowprec.kernels.quantize.triton_kernel import Layout, MxKernel


def quantize_mx(
    x: torch.Tensor | CodedMatrix,
    rule: MxRule,
    *,
    rows: Direction | None = None,
    columns: Direction | None = None,
    rng_step: torch.Tensor,
    spans: tuple[ShardSlice, ShardSlice] = (WHOLE, WHOLE),
    codes: bool = False,
    whole: bool = False,
    beside: bool = False,
    out_dtype: torch.dtype | None = None,
) -> MxCast:
    """Rowwise data in blocks, columnwise data or both of a matrix, from one read or one a direction.

    Args:
        x: [M, N] bf16 or fp32 on the current device, the last dimension contiguous; N a multiple of ``rule.block`` and
            of len(signs) if ``rows`` is given. Any M: the kernel zero-pads columns, which changes no scale. For
            ``columns`` only, a coded one.
        rule: format, scale and rounding. Square blocks: nearest, no transform, one output for both; codes
            only along columns, with a scale for each row of them.
        rows: rowwise data, blocks along the last dimension (the operand x); None to omit.
        columns: columnwise data, blocks along the first dimension (the operand x.T); None to omit.
        rng_step: int32 [2] on the device of x, step and microbatch of the draws. It is in memory so that a captured
            CUDA graph draws new bits in each replay.
        spans: location of the rows and the columns of x in the unsharded matrix.
        codes: write codes and scale bytes, the layout of native GEMMs; else dequantized values, headroom included, but
            without the tensor's scale.
        whole: multiply values by the tensor's scale too, which is rounded with the block's scale to fp32.
        beside: also write a ``CodedMatrix`` of the values, of rows only; if ``rule.makes_nvfp4``.
        out_dtype: of dequantized values; None for that of x; required for a coded one.
    """
    others: dict[str, Any] = {"rng_step": rng_step, "spans": spans, "whole": whole, "out_dtype": out_dtype}
    if rule.block_rows > 1 and rows is not None:
        assert isinstance(x, torch.Tensor)
        return _square(x, rule, rows, columns, **others)
    coded, read = (x, x.codes) if isinstance(x, CodedMatrix) else (None, x)
    row_signs, column_signs = rows and rows.signs, columns and columns.signs
    # of the transform in each direction: its block, 0 without one, None if data are not asked for
    row_block = rows and (0 if row_signs is None else row_signs.numel())
    column_block = columns and (0 if column_signs is None else column_signs.numel())
    if rows and columns and _takes_two_kernels(rule, row_block or 0, column_block or 0, codes):
        by_row = quantize_mx(x, rule, rows=rows, codes=codes, **others)
        by_column = quantize_mx(x, rule, columns=columns, codes=codes, **others)
        scales = by_row.rowwise_tensor_scale, by_column.columnwise_tensor_scale
        return MxCast(*by_row[:2], *by_column[2:4], *scales)
    lanes_first = columns is not None and columns.lanes_first
    layout = (read.shape, read.stride(0), read.data_ptr() % 16, read.dtype, read.device, out_dtype)
    key = (*layout, row_block, column_block, codes, lanes_first, whole, coded is not None, beside)
    known = rule.prepared.get(key)
    if known is None:
        known = _prepare(read, rule, *key[5:])
        if len(rule.prepared) >= MOST_LAYOUTS:
            rule.prepared.clear()
        if known.specialized is not None:
            rule.prepared[key] = known
    kernel, specialized, programs, layouts, sizes, specialized_on = known
    empty, device = EMPTY[read.device.type], read.device
    made: list[Any] = [None if each is None else empty(*each) for each in layouts]
    row_data, row_scale, written, column_scale, decode, packed, of_blocks = made
    of_tensor: Sequence[Any] = (None, None) if decode is None else decode.unbind()
    cast = MxCast(
        row_data,
        row_scale,
        written if codes or written is None else written.t(),
        column_scale,
        rows and of_tensor[0],
        columns and of_tensor[1],
    )
    if beside:
        coded = CodedMatrix(packed, of_blocks, of_tensor[0])
        cast = cast._replace(beside=coded)
    row_key, _, row_amax, row_scale_key, _ = rows or _NOTHING
    column_key, _, column_amax, column_scale_key, _ = columns or _NOTHING
    # placeholders for what is absent, which the kernel does not access
    tensors = (*made[:4], row_signs, column_signs, row_amax, column_amax, decode)
    arguments = (
        read,
        *[read if each is None else each for each in tensors],
        *sizes,
        *row_key,
        *column_key,
        *row_scale_key,
        *column_scale_key,
        rng_step,
        *spans[0],
        *spans[1],
        kernel.unit,
        *(coded or (read, read, read)),
    )
    if specialized is None:  # tilings are to be measured
        M, N = x.shape

        def launch(tiling: Tiling) -> None:
            kernel.specialized[tiling].launch(tiling.programs(M, N), device, arguments, specialized_on)

        tiling = kernel.tuned.choose(M * N, launch, device)
        specialized, programs = kernel.specialized[tiling], tiling.programs(M, N)
    specialized.launch(programs, device, arguments, specialized_on)
    return cast


_NOTHING = Direction()


def _takes_two_kernels(rule: MxRule, row_block: int, column_block: int, codes: bool) -> bool:
    """Whether two kernels, with one group in registers each, beat one kernel that reads less."""
    if max(row_block, column_block) > LONGEST_FUSED:
        # a tile of whole groups in both directions has several a thread, which spill and compile for minutes
        return True
    # bound by arithmetic
    return row_block > 0 and (rule.rounding == "stochastic" or rule.options.group > 0) and not codes


def _square(x: torch.Tensor, rule: MxRule, rows: Direction, columns: Direction | None, **others: Any) -> MxCast:
    """Square blocks for rows, and for columns if asked, by the kernel along columns, which writes the layout of x."""
    way = rows if rule.shares_directions else rows._replace(lanes_first=True)
    found = quantize_mx(x, rule, columns=way, **others)
    data, scale = found.columnwise_data, found.columnwise_tensor_scale
    assert data is not None
    if columns is None:
        found = MxCast()
    elif not rule.shares_directions:
        found = quantize_mx(x, rule, columns=columns, **others)
    return found._replace(rowwise_data=data.t(), rowwise_tensor_scale=scale)


class _Prepared(NamedTuple):
    """Constants of quantizations of matrices of one layout.

    Attributes:
        kernel: its tilings.
        specialized, programs: the kernel for the tiling, and its programs; None until that is known.
        layouts: of rowwise data and scale, columnwise ones, the tensor's scales, and the codes beside and their scales.
        sizes: the kernel's arguments from M to ``col_pitch``.
        specialized_on: properties of the matrix and the sizes on which Triton specializes the kernel.
    """

    kernel: MxKernel
    specialized: Specialized | None
    programs: Any
    layouts: tuple[Layout | None, ...]
    sizes: tuple[int, ...]
    specialized_on: tuple[Any, ...]


def _prepare(
    x: torch.Tensor,
    rule: MxRule,
    out_dtype: torch.dtype | None,
    row_block: int | None,
    column_block: int | None,
    codes: bool,
    lanes_first: bool,
    whole: bool,
    coded: bool,
    beside: bool,
) -> _Prepared:
    """``x``: the memory that is read."""
    rows, columns = row_block is not None, column_block is not None
    aligned, stride, dtype = x.data_ptr() % 16 == 0, x.stride(0), out_dtype or x.dtype
    packed = x.dtype == torch.bfloat16 and (x.shape[1] | stride | x.data_ptr() // 2) % 2 == 0
    block = row_block or column_block or 0
    plain = (row_block == 0) + 2 * (column_block == 0) if block else 0
    key = (block, rows, columns, packed, codes, converts_fp8(x.device), plain, lanes_first, whole, coded, beside)
    kernel = rule.kernels.get(key)
    if kernel is None:
        kernel = rule.kernels[key] = MxKernel(rule, *key)
    M, N = x.shape[0], x.shape[1] * (1 + coded)
    padded_M, layouts = kernel.layouts(M, N, dtype)
    pitches = (N // kernel.codes_a_byte, padded_M // kernel.codes_a_byte) if codes else (0, 0)
    specialized_on = (x.dtype, dtype, aligned, N % 16 == 0, stride % 16 == 0, N == 1, stride == 1)
    if codes:  # a pitch is a multiple of 8 or more under blocks of 16
        specialized_on += tuple(pitch % 16 == 0 for pitch in pitches)
    tiling = kernel.tuned.known(M * N)
    specialized, programs = (None, None) if tiling is None else (kernel.specialized[tiling], tiling.programs(M, N))
    return _Prepared(kernel, specialized, programs, layouts, (M, padded_M, N, stride, *pitches), specialized_on)
