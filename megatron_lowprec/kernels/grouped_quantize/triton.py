"""One launch for the MX operands of a group of matrices, addresses and keys in a table; bits equal ``reference.py``.

A program finds its matrix by the first tile of each, so tables have one column a matrix, whatever their rows.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.amax.triton_ops import amax_along, raise_to_amax
from megatron_lowprec.kernels.launch import Specialized, launch
from megatron_lowprec.kernels.matrices import Matrices, units_of
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import WHOLE, ShardSlice
from megatron_lowprec.kernels.philox.triton import draw_bits, place
from megatron_lowprec.kernels.quantize.rule import MxRule, converts_fp8
from megatron_lowprec.kernels.quantize.triton_coded import tensor_amax, write_tensor_scale
from megatron_lowprec.kernels.quantize.triton_groups import quantize_groups
from megatron_lowprec.kernels.quantize.triton_ops import transformed

_SPANS = ["m_start", "m_gate_offset", "m_gate_stride", "n_start", "n_gate_offset", "n_gate_stride"]
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def group_of(first_tile_ptr, tile, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """Number of the group with a tile: the last of those that begin at or before it. Empty groups have no tile."""
    group = tl.arange(0, PADDED)
    first = tl.load(first_tile_ptr + group, mask=group < GROUPS, other=2**31 - 1)
    return tl.sum((first <= tile).to(tl.int32)) - 1


@lru_cache(maxsize=64)
def constants_of_groups(groups: int) -> Mapping[str, int]:
    """What kernels with ``group_of`` are compiled for."""
    return MappingProxyType({"GROUPS": groups, "PADDED": triton.next_power_of_2(groups)})


@triton.jit
def _source_of(table_ptr, tile, BM: tl.constexpr, ELEMENT: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """The matrix with a tile of rows, by the table's first four rows: its number, address, rows, and the tile's first.

    Table, int64 [4, GROUPS]: address, rows, first row of the output, first tile.
    """
    matrix = group_of(table_ptr + 3 * GROUPS, tile, GROUPS, PADDED)
    x_ptr = tl.multiple_of(tl.load(table_ptr + matrix).to(tl.pointer_type(ELEMENT)), 16)
    M = tl.load(table_ptr + GROUPS + matrix).to(tl.int32)
    first_m = (tile - tl.load(table_ptr + 3 * GROUPS + matrix).to(tl.int32)) * BM
    return matrix, x_ptr, M, first_m


@triton.jit
def _columns_of(x, TALL: tl.constexpr, GROUP: tl.constexpr):
    """[TALL * GROUP, BN] -> groups along columns, fp32 [GROUP, TALL * BN]."""
    BN: tl.constexpr = x.shape[1]
    groups = tl.permute(tl.reshape(x, [TALL, GROUP, BN]), (1, 0, 2))
    return tl.reshape(groups, [GROUP, TALL * BN]).to(tl.float32)


@triton.jit
def _amaxes_of_groups_kernel(
    amax_ptr,
    table_ptr,
    signs_ptr,
    N,
    ALONG_ROWS: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROUNDS: tl.constexpr,
    GROUP: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Table as in ``_source_of``."""
    tiles_n = tl.cdiv(N, BN)
    matrix, x_ptr, M, first_m = _source_of(table_ptr, tl.program_id(0) // tiles_n, BM, ELEMENT, GROUPS, PADDED)
    rows = first_m + tl.arange(0, BM)
    cols = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]
    x = tl.load(x_ptr + offsets, mask=(rows < M)[:, None] & (cols < N)[None, :], other=0.0)
    if HADAMARD:
        if ALONG_ROWS:
            y = tl.trans(tl.reshape(x, [BM * BN // GROUP, GROUP])).to(tl.float32)
        else:
            y = _columns_of(x, BM // GROUP, GROUP)
        y = transformed(y, signs_ptr + matrix * GROUP, GROUP, ROUNDS, ELEMENT)
    else:
        y = x.to(tl.float32)
    raise_to_amax(amax_ptr + matrix, amax_along(tl.abs(y), 0))


@triton.jit(do_not_specialize=[*_SPANS, "unit"])
def _grouped_mx_kernel(
    out_ptr,
    tensor_scale_ptr,
    table_ptr,
    signs_ptr,
    amax_ptr,
    N,
    rng_step_ptr,
    m_start,
    m_gate_offset,
    m_gate_stride,
    n_start,
    n_gate_offset,
    n_gate_stride,
    unit,
    MX: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Table, int64 [8, GROUPS]: as in ``_source_of``, two words of the key, and two of that of scales."""
    GROUP: tl.constexpr = MX.GROUP
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    tiles_n = tl.cdiv(N, BN)
    first_n = (tl.program_id(0) % tiles_n) * BN
    matrix, x_ptr, M, first_m = _source_of(table_ptr, tl.program_id(0) // tiles_n, BM, ELEMENT, GROUPS, PADDED)
    out_ptr += tl.load(table_ptr + 2 * GROUPS + matrix) * N
    amax = tensor_amax(amax_ptr + matrix, MX)
    write_tensor_scale(tensor_scale_ptr + matrix, amax, (first_m == 0) & (first_n == 0), MX)
    key0 = tl.load(table_ptr + 4 * GROUPS + matrix).to(tl.int32).to(tl.uint32, bitcast=True)
    key1 = tl.load(table_ptr + 5 * GROUPS + matrix).to(tl.int32).to(tl.uint32, bitcast=True)
    scale_key0 = tl.load(table_ptr + 6 * GROUPS + matrix).to(tl.int32).to(tl.uint32, bitcast=True)
    scale_key1 = tl.load(table_ptr + 7 * GROUPS + matrix).to(tl.int32).to(tl.uint32, bitcast=True)
    if MX.HADAMARD:
        signs_ptr += matrix * GROUP
    rows = first_m + tl.arange(0, BM)
    cols = first_n + tl.arange(0, BN)
    offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    step = tl.load(rng_step_ptr).to(tl.uint32, bitcast=True)
    microbatch = tl.load(rng_step_ptr + 1).to(tl.uint32, bitcast=True)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    if MX.ALONG_ROWS:
        P: tl.constexpr = BM * BN // GROUP
        PER_ROW: tl.constexpr = BN // GROUP
        lane = tl.arange(0, P)
        out, _, _ = quantize_groups(
            tl.trans(tl.reshape(x, [P, GROUP])).to(tl.float32),
            place(first_m + lane // PER_ROW, m_start, m_gate_offset, m_gate_stride),
            first_n + (lane % PER_ROW) * GROUP,
            n_start,
            n_gate_offset,
            n_gate_stride,
            signs_ptr,
            amax,
            key0,
            key1,
            scale_key0,
            scale_key1,
            step,
            microbatch,
            unit,
            MX,
            MX.HADAMARD,
            ELEMENT,
        )
        out = tl.reshape(tl.trans(out.to(OUT)), [BM, BN])
        tl.store(out_ptr + offsets, out, mask=mask)
    else:
        TALL: tl.constexpr = BM // GROUP
        stacked = tl.arange(0, TALL * BN)
        out, _, _ = quantize_groups(
            _columns_of(x, TALL, GROUP),
            place(first_n + stacked % BN, n_start, n_gate_offset, n_gate_stride),
            first_m + (stacked // BN) * GROUP,
            m_start,
            m_gate_offset,
            m_gate_stride,
            signs_ptr,
            amax,
            key0,
            key1,
            scale_key0,
            scale_key1,
            step,
            microbatch,
            unit,
            MX,
            MX.HADAMARD,
            ELEMENT,
        )
        out = tl.reshape(tl.permute(tl.reshape(out.to(OUT), [GROUP, TALL, BN]), (1, 0, 2)), [BM, BN])
        written = M
        if MX.HADAMARD:  # the transform makes a group dense, padding included
            written = tl.cdiv(M, GROUP) * GROUP
        tl.store(out_ptr + offsets, out, mask=(rows < written)[:, None] & (cols < N)[None, :])


@triton.jit
def _signs_of_groups_kernel(out_ptr, keys_ptr, rng_step_ptr, scale, GROUP: tl.constexpr):
    row = tl.program_id(0)
    zero = tl.zeros([1], tl.int32)
    bits = draw_bits(
        zero.to(tl.uint32),
        zero,
        tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True),
        tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True),
        tl.load(rng_step_ptr).to(tl.uint32, bitcast=True),
        tl.load(rng_step_ptr + 1).to(tl.uint32, bitcast=True),
        0,
        GROUP,
        0,
        GROUP,
    )
    signs = tl.reshape(1.0 - 2.0 * (bits >> 15).to(tl.float32), [GROUP])
    tl.store(out_ptr + row * GROUP + tl.arange(0, GROUP), signs * scale)


@lru_cache(maxsize=256)
def _words_of(keys: tuple[Key, ...]) -> np.ndarray:
    """int64 [2, keys]: the words of each."""
    words = np.array(keys, dtype=np.int64).T
    words.flags.writeable = False
    return words


def scaled_signs_of_groups(keys: Sequence[Key], rng_step: torch.Tensor, group: int) -> torch.Tensor:
    """As the reference."""
    device = rng_step.device
    out = torch.empty((len(keys), group), dtype=torch.float32, device=device)
    words = torch.from_numpy(_words_of(tuple(keys)).T.astype(np.int32)).to(device, non_blocking=True)
    launch(_signs_of_groups_kernel, len(keys), (out, words, rng_step, group**-0.5), {"GROUP": group}, num_warps=1)
    return out


def amaxes_of_groups(
    sources: Sequence[torch.Tensor], rule: MxRule, *, columnwise: bool, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """As the reference."""
    matrices = Matrices.of(sources)
    N, dtype, device = matrices.columns, matrices.dtype, matrices.device
    group = 16 if signs is None else signs.shape[1]
    height, width = (4 * group, max(32, 2048 // group)) if columnwise else (32, max(256, group))
    amaxes = torch.zeros(len(sources), dtype=torch.float32, device=device)
    table, tiles, _ = _table(matrices, height)
    programs = tiles * -(-N // width)
    if programs:
        kernel = _amaxes_specialized(
            signs is not None, rule.rounds_transform, group, columnwise, dtype, len(sources), height, width
        )
        arguments = (
            amaxes,
            torch.from_numpy(table).to(device, non_blocking=True),
            amaxes if signs is None else signs,
            N,
        )
        kernel.launch(programs, device, arguments, (N % 16 == 0, N == 1))
    return amaxes


@lru_cache(maxsize=256)
def _amaxes_specialized(
    transforms: bool,
    rounds: bool,
    group: int,
    columnwise: bool,
    dtype: torch.dtype,
    groups: int,
    height: int,
    width: int,
) -> Specialized:
    constants = {
        "ALONG_ROWS": not columnwise,
        "HADAMARD": transforms,
        "ROUNDS": rounds,
        "GROUP": group,
        "ELEMENT": _DTYPES[dtype],
        **constants_of_groups(groups),
        "BM": height,
        "BN": width,
    }
    return Specialized(_amaxes_of_groups_kernel, constants, num_warps=4, enable_fp_fusion=False)


def _table(matrices: Matrices, tile_rows: int, whole: int = 1) -> tuple[np.ndarray, int, int]:
    """The table of ``_source_of`` with room for keys, int64 [8, sources]; the tiles of rows; the output's rows.

    Args:
        whole: multiple to which a source's rows are padded in the output.
    """
    (_, written, total), (_, first_tile, tiles) = (units_of(matrices.rows, size) for size in (whole, tile_rows))
    table = np.zeros((8, len(matrices)), dtype=np.int64)
    table[0], table[1], table[2], table[3] = matrices.addresses, matrices.rows, written * whole, first_tile
    return table, tiles, total * whole


def quantize_mx_groups(
    sources: Sequence[torch.Tensor],
    rule: MxRule,
    *,
    columnwise: bool,
    keys: Sequence[Key],
    signs: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    scale_keys: Sequence[Key] | None = None,
    rng_step: torch.Tensor,
    spans: tuple[ShardSlice, ShardSlice] = (WHOLE, WHOLE),
    whole: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference."""
    matrices = Matrices.of(sources)
    N, dtype, device = matrices.columns, matrices.dtype, matrices.device
    block, dtypes = 0 if signs is None else signs.shape[1], (dtype, out_dtype or dtype)
    whole = whole and rule.target is not None
    kernel, tile_rows, tile_columns, unit = _specialized(
        rule, block, columnwise, dtypes, len(sources), converts_fp8(device), whole
    )
    table, tiles, written = _table(matrices, tile_rows, block if block and columnwise else 1)
    table[4:6], table[6:] = (_words_of(tuple(each)) for each in (keys, keys if scale_keys is None else scale_keys))
    out = torch.empty((written, N), dtype=dtypes[1], device=device)
    # an empty source has the scale of an amax of 0
    tensor_scale = None if rule.target is None else torch.ones(len(sources), dtype=torch.float32, device=device)
    programs = tiles * -(-N // tile_columns)
    if programs:
        on_device = torch.from_numpy(table).to(device, non_blocking=True)
        pointers = (out if each is None else each for each in (tensor_scale, on_device, signs, amax))
        arguments = (out, *pointers, N, rng_step, *spans[0], *spans[1], unit)
        kernel.launch(programs, device, arguments, (N % 16 == 0, N == 1))
    return out, tensor_scale


@lru_cache(maxsize=256)
def _specialized(
    rule: MxRule,
    block: int,
    columnwise: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    groups: int,
    converts: bool,
    whole: bool,
) -> tuple[Specialized, int, int, int]:
    """The kernel, the rows and columns of its tile, and its argument ``unit``; dtypes of the sources and the output."""
    lanes_first, columnwise = not columnwise and not rule.shares_directions, columnwise or rule.block_rows > 1
    constants = rule.constants(
        block,
        rows=not columnwise,
        columns=columnwise,
        packed=False,
        codes=False,
        converts=converts,
        lanes_first=lanes_first and rule.block_rows > 1,
        whole=whole,
    )
    stochastic = rule.rounding == "stochastic"
    group, warps = constants.GROUP, 1 + (block > 0)
    rows, columns = (group, 32 if block and stochastic else 64) if columnwise else (8 if block else 4, 8 * group)
    if group <= 16:  # several groups a thread share addresses and the tensor's scale
        rows, columns, warps = (group, 128, 1) if columnwise else (4, 512, 1)
    options: dict[str, Any] = {"num_warps": 1 if columnwise and block and stochastic else warps}
    kernel = Specialized(
        _grouped_mx_kernel,
        {
            "MX": constants,
            "ELEMENT": _DTYPES[dtypes[0]],
            **constants_of_groups(groups),
            "BM": rows,
            "BN": columns,
        },
        # a contracted multiply-add rounds once, the reference twice
        enable_fp_fusion=False,
        **options,
    )
    return kernel, rows, columns, 1 << max(0, 23 - constants.MANTISSA - constants.RANDOM_BITS)
