"""One launch for the FP8 codes of a group of matrices, with addresses in a table; bits equal ``reference.py``."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.kernels.cast_fp8.triton_ops import ROW, encode_scale, observe, to_fp8
from megatron_lowprec.kernels.grouped_cast_fp8 import reference
from megatron_lowprec.kernels.grouped_cast_fp8.reference import GroupedFp8Cast
from megatron_lowprec.kernels.grouped_quantize.triton import constants_of_groups, group_of
from megatron_lowprec.kernels.launch import launch
from megatron_lowprec.kernels.matrices import Matrices, addresses_of, units_of

_BLOCK = tl.constexpr(reference.BLOCK)
_COLUMNS, _WARPS = 64, 4  # not tuned


@triton.jit
def _amax_of_groups_kernel(
    amax_ptr,
    table_ptr,
    N,
    OF_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BN: tl.constexpr,
):
    """Table, int64 [3, GROUPS]: address, rows, first block."""
    block = tl.program_id(0)
    matrix = group_of(table_ptr + 2 * GROUPS, block, GROUPS, PADDED)
    x_ptr = tl.multiple_of(tl.load(table_ptr + matrix).to(tl.pointer_type(tl.bfloat16)), 16)
    m = (block - tl.load(table_ptr + 2 * GROUPS + matrix)) * _BLOCK + tl.arange(0, _BLOCK)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (m < tl.load(table_ptr + GROUPS + matrix))[:, None] & (n < N)[None, :]
    x = tl.load(x_ptr + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    amax = amax_along(tl.abs(x), 0)
    amax_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if OF_COLUMNS:
        cells = amax_ptr + matrix.to(tl.int64) * N + n[None, :]
        within = (n < N)[None, :]
    else:
        amax = amax_along(amax, 1)
        cells = amax_ptr + matrix + tl.zeros([1, 1], tl.int32)
        within = tl.full([1, 1], True, tl.int1)
    # nonnegative numbers compare as their bits do
    tl.atomic_max(cells, amax.to(tl.int32, bitcast=True), mask=within, sem="relaxed")


@triton.jit
def _cast_groups_kernel(
    row_ptr,
    col_ptr,
    table_ptr,
    N,
    padded,
    CAST: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BN: tl.constexpr,
):
    """Table, int64 [5, GROUPS]: address, rows, first block, and addresses of the amax and of the observed amax."""
    block = tl.program_id(0)
    matrix = group_of(table_ptr + 2 * GROUPS, block, GROUPS, PADDED)
    x_ptr = tl.multiple_of(tl.load(table_ptr + matrix).to(tl.pointer_type(tl.bfloat16)), 16)
    own = (block - tl.load(table_ptr + 2 * GROUPS + matrix)) * _BLOCK + tl.arange(0, _BLOCK)
    n = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    mask = (own < tl.load(table_ptr + GROUPS + matrix))[:, None] & (n < N)[None, :]
    x = tl.load(x_ptr + own[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    if CAST.OBSERVES:
        observed = tl.load(table_ptr + 4 * GROUPS + matrix).to(tl.pointer_type(tl.float32))
        observe(observed, amax_along(amax_along(tl.abs(x), 1), 0))
    amax_ptr = tl.load(table_ptr + 3 * GROUPS + matrix).to(tl.pointer_type(tl.float32))
    if CAST.GRANULARITY == ROW:
        amax = tl.load(amax_ptr + n, mask=n < N, other=0.0)[None, :]
    else:
        amax = tl.full([1, 1], 0.0, tl.float32) + tl.load(amax_ptr)
    scale = encode_scale(amax, CAST)
    CODES: tl.constexpr = CAST.CODES
    codes = to_fp8(tl.where(mask, x * scale, 0.0), CODES)
    m = block.to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    inside = (n < N)[None, :]
    if CAST.ALONG_ROWS:
        tl.store(row_ptr + m[:, None] * N + n[None, :], codes, mask=inside)
    if CAST.ALONG_COLUMNS:
        tl.store(col_ptr + n[:, None] * padded + m[None, :], tl.trans(codes), mask=tl.trans(inside))


@triton.jit
def _scale_of_groups_kernel(scale_ptr, table_ptr, length, CAST: tl.constexpr, GROUPS: tl.constexpr, BN: tl.constexpr):
    """``length`` decode scales of each group; table as in ``_cast_groups_kernel``."""
    matrix = tl.program_id(0)
    at = tl.program_id(1) * BN + tl.arange(0, BN)
    amax_ptr = tl.load(table_ptr + 3 * GROUPS + matrix).to(tl.pointer_type(tl.float32))
    scale = encode_scale(tl.load(amax_ptr + at, mask=at < length, other=0.0), CAST)
    decode = tl.div_rn(tl.full([BN], 1.0, tl.float32), scale)
    tl.store(scale_ptr + matrix.to(tl.int64) * length + at, decode, mask=at < length)


def amax_of_groups(sources: Sequence[torch.Tensor], *, columns: bool = False) -> torch.Tensor:
    """As the reference."""
    matrices = Matrices.of(sources)
    return _amax(matrices, _table(matrices).to(matrices.device, non_blocking=True), _empty_amax(matrices, columns))


def cast_fp8_groups(
    sources: Sequence[torch.Tensor],
    rule: Fp8Rule,
    *,
    amax: Sequence[torch.Tensor] | torch.Tensor | None = None,
    reduce_amax: Callable[[torch.Tensor], torch.Tensor] | None = None,
    observed: Sequence[torch.Tensor] | torch.Tensor | None = None,
    rowwise: bool,
    columnwise: bool,
) -> GroupedFp8Cast:
    """As the reference."""
    matrices, of_columns = Matrices.of(sources), rule.granularity == "row"
    groups, N, device = len(matrices), matrices.columns, matrices.device
    in_effect = _empty_amax(matrices, of_columns) if amax is None else amax
    addresses = addresses_of(in_effect)
    table = _table(matrices, addresses, addresses if observed is None else addresses_of(observed))
    table = table.to(device, non_blocking=True)
    if amax is None:
        assert isinstance(in_effect, torch.Tensor)
        _amax(matrices, table, in_effect)
        if reduce_amax is not None:
            in_effect.copy_(reduce_amax(in_effect))
    constants = rule.constants(rowwise, columnwise, observed is not None, False, 0, (0, 0), device)
    blocks = units_of(matrices.rows, reference.BLOCK)[2]
    padded = blocks * reference.BLOCK
    rows = torch.empty((padded, N), dtype=torch.uint8, device=device) if rowwise else None
    columns = torch.empty((N, padded), dtype=torch.uint8, device=device) if columnwise else None
    scale = torch.empty((groups, N) if of_columns else groups, dtype=torch.float32, device=device)
    if blocks:
        # placeholders for an absent direction, which the kernel does not access
        launch(
            _cast_groups_kernel,
            (blocks, -(-N // _COLUMNS)),
            (scale if rows is None else rows, scale if columns is None else columns, table, N, padded),
            {"CAST": constants, **constants_of_groups(groups), "BN": _COLUMNS},
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    length = N if of_columns else 1
    launch(
        _scale_of_groups_kernel,
        (groups, -(-length // _COLUMNS)),
        (scale, table, length),
        {"CAST": constants, "GROUPS": groups, "BN": _COLUMNS},
        num_warps=1,
    )
    return GroupedFp8Cast(
        None if rows is None else rows.view(rule.dtype), None if columns is None else columns.view(rule.dtype), scale
    )


def _empty_amax(matrices: Matrices, columns: bool) -> torch.Tensor:
    shape = (len(matrices), matrices.columns) if columns else (len(matrices),)
    return torch.zeros(shape, dtype=torch.float32, device=matrices.device)


def _amax(matrices: Matrices, table: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Raises ``amax``, zeros, to that of each matrix or of its columns."""
    if blocks := units_of(matrices.rows, reference.BLOCK)[2]:
        constants = {"OF_COLUMNS": amax.dim() == 2, **constants_of_groups(len(matrices)), "BN": _COLUMNS}
        grid = blocks, -(-matrices.columns // _COLUMNS)
        launch(_amax_of_groups_kernel, grid, (amax, table, matrices.columns), constants)
    return amax


def _table(matrices: Matrices, *more: np.ndarray) -> torch.Tensor:
    """Address, rows and first block of each matrix, then ``more``, in one table for all launches of a cast."""
    first = units_of(matrices.rows, reference.BLOCK)[1]
    return torch.from_numpy(np.array((matrices.addresses, units_of(matrices.rows)[0], first, *more)))
