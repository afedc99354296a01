"""One launch for the FP8 codes of a group of matrices, with addresses in a table; bits equal ``reference.py``."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along
from megatron_lowprec.kernels.cast_fp8.prologue import KINDS
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Cast, Fp8Rule
from megatron_lowprec.kernels.cast_fp8.tiles import cast_tile
from megatron_lowprec.kernels.cast_fp8.triton import Tiling, tilings_of
from megatron_lowprec.kernels.cast_fp8.triton_ops import BLOCK_1X128, BLOCK_128X128, ROW
from megatron_lowprec.kernels.grouped_cast_fp8 import reference
from megatron_lowprec.kernels.grouped_quantize.triton import constants_of_groups, group_of
from megatron_lowprec.kernels.launch import launch
from megatron_lowprec.kernels.matrices import Matrices, addresses_of, units_of
from megatron_lowprec.kernels.tuning import Tuned

_BLOCK = tl.constexpr(reference.BLOCK)
_COLUMNS = 64  # of an amax's tile, not tuned


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
    """Table, int64 [3 or more, GROUPS]: address, rows, first padded row."""
    row = tl.program_id(0) * _BLOCK
    matrix = group_of(table_ptr + 2 * GROUPS, row, GROUPS, PADDED)
    x_ptr = tl.multiple_of(tl.load(table_ptr + matrix).to(tl.pointer_type(tl.bfloat16)), 16)
    m = row - tl.load(table_ptr + 2 * GROUPS + matrix) + tl.arange(0, _BLOCK)
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
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    table_ptr,
    N,
    padded,
    CAST: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Table, int64 [5, GROUPS]: address, rows, first padded row, and addresses of the amax and of the observed amax."""
    tiles_n = tl.cdiv(N, BN)
    row, tile_n = tl.program_id(0) // tiles_n * BM, tl.program_id(0) % tiles_n
    matrix = group_of(table_ptr + 2 * GROUPS, row, GROUPS, PADDED)
    first = tl.multiple_of(tl.load(table_ptr + 2 * GROUPS + matrix), _BLOCK)
    tile_m = (row - first).to(tl.int32) // BM
    x_ptr = tl.multiple_of(tl.load(table_ptr + matrix).to(tl.pointer_type(tl.bfloat16)), 16)
    M = tl.load(table_ptr + GROUPS + matrix).to(tl.int32)
    amax_ptr = tl.load(table_ptr + 3 * GROUPS + matrix).to(tl.pointer_type(tl.float32))
    observed_ptr = tl.load(table_ptr + 4 * GROUPS + matrix).to(tl.pointer_type(tl.float32))
    row_ptr += first * N
    col_ptr += first
    if CAST.GRANULARITY == BLOCK_1X128:
        row_scale_ptr += first
        col_scale_ptr += first // _BLOCK * N
    elif CAST.GRANULARITY == BLOCK_128X128:
        row_scale_ptr += first // _BLOCK * (tl.cdiv(tiles_n, 4) * 4)
        col_scale_ptr += first // _BLOCK
    elif CAST.GRANULARITY == ROW:
        col_scale_ptr += matrix.to(tl.int64) * N
        amax_ptr -= M  # ``cast_tile`` expects amaxes of rows before those of columns
    else:
        row_scale_ptr += matrix
        col_scale_ptr += matrix
    source = (x_ptr, x_ptr, x_ptr, x_ptr, 0, 1.0)
    cast_tile(
        source, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, observed_ptr, amax_ptr,
        tile_m, tile_n, M, padded, padded, N, N, CAST, BM, BN, ROWS, COLUMNS
    )  # fmt: skip


class _Kernel:
    """The cast by one rule with one set of outputs; ``tuned`` selects a tiling for each power of two of sizes."""

    def __init__(self, rule: Fp8Rule, rows: bool, columns: bool, observes: bool, device: torch.device) -> None:
        self.constants = rule.constants(rows, columns, observes, False, KINDS["matrix"], (0, 0), device)
        name = f"{_cast_groups_kernel.__name__} {self.constants._asdict()}"
        self.tuned = Tuned(name, tilings_of(rule.granularity, rows, columns))


def amax_of_groups(sources: Sequence[torch.Tensor], *, columns: bool = False) -> torch.Tensor:
    """As the reference."""
    matrices = Matrices.of(sources)
    amax = _empty_amax(matrices, columns)
    _raise_amax(amax, matrices, _table(matrices))
    return amax


def cast_fp8_groups(
    sources: Sequence[torch.Tensor],
    rule: Fp8Rule,
    *,
    amax: Sequence[torch.Tensor] | torch.Tensor | None = None,
    reduce_amax: Callable[[torch.Tensor], torch.Tensor] | None = None,
    observed: Sequence[torch.Tensor] | torch.Tensor | None = None,
    rowwise: bool,
    columnwise: bool,
) -> Fp8Cast:
    """As the reference."""
    matrices, of_columns = Matrices.of(sources), rule.granularity == "row"
    groups, N, device = len(matrices), matrices.columns, matrices.device
    padded = units_of(matrices.rows, reference.BLOCK)[2] * reference.BLOCK
    made = rule.empty(torch.Size((padded, N)), device, rowwise=rowwise, columnwise=columnwise)
    if rule.granularity in reference.BLOCKS:
        table = _table(matrices, *np.zeros((2, groups), dtype=np.int64))  # no amaxes
    else:
        in_effect = _empty_amax(matrices, of_columns) if amax is None else amax
        addresses = addresses_of(in_effect)
        table = _table(matrices, addresses, addresses if observed is None else addresses_of(observed))
        if amax is None:
            assert isinstance(in_effect, torch.Tensor)
            _raise_amax(in_effect, matrices, table)
            if reduce_amax is not None:
                in_effect.copy_(reduce_amax(in_effect))
        scale = torch.ones((groups, N) if of_columns else groups, dtype=torch.float32, device=device)
        made = Fp8Cast(made[0], scale if rowwise else None, made[2], scale if columnwise else None)
    key = _cast_groups_kernel, rowwise, columnwise, observed is not None
    kernel = rule.kernels.get(key)
    if kernel is None:
        kernel = rule.kernels[key] = _Kernel(rule, *key[1:], device)
    # placeholders for an absent direction, which the kernel does not access
    arguments = (*(table if tensor is None else tensor for tensor in made[:4]), table, N, padded)

    def run(tiling: Tiling) -> None:
        launch(
            _cast_groups_kernel,
            padded // tiling.rows * -(-N // tiling.columns),
            arguments,
            {"CAST": kernel.constants, **constants_of_groups(groups), **tiling.constants()},
            num_warps=tiling.warps,
            enable_fp_fusion=False,  # a contracted multiply-add rounds once, the reference twice
        )

    if padded:
        entries = padded * N
        run(kernel.tuned.choose(entries, run, device, below=entries.bit_length()))
    return made


def _empty_amax(matrices: Matrices, columns: bool) -> torch.Tensor:
    shape = (len(matrices), matrices.columns) if columns else (len(matrices),)
    return torch.zeros(shape, dtype=torch.float32, device=matrices.device)


def _raise_amax(amax: torch.Tensor, matrices: Matrices, table: torch.Tensor) -> None:
    """Raises ``amax``, zeros, to that of each matrix or of its columns."""
    if blocks := units_of(matrices.rows, reference.BLOCK)[2]:
        constants = {"OF_COLUMNS": amax.dim() == 2, **constants_of_groups(len(matrices)), "BN": _COLUMNS}
        grid = blocks, -(-matrices.columns // _COLUMNS)
        launch(_amax_of_groups_kernel, grid, (amax, table, matrices.columns), constants)


def _table(matrices: Matrices, *more: np.ndarray) -> torch.Tensor:
    """Address, rows and first padded row of each matrix, then ``more``, in one table for all launches of a cast."""
    rows, first_row = units_of(matrices.rows)[0], units_of(matrices.rows, reference.BLOCK)[1] * reference.BLOCK
    table = torch.from_numpy(np.array((matrices.addresses, rows, first_row, *more)))
    return table.to(matrices.device, non_blocking=True)
