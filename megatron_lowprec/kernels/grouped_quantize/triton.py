"""One launch for the MX operands of a group of matrices, addresses and keys in a table; bits equal ``reference.py``.

A program finds its matrix by the first tile of each, so tables have one column a matrix, whatever their rows.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import WHOLE, ShardSlice
from megatron_lowprec.kernels.philox.triton import draw_bits, place
from megatron_lowprec.kernels.quantize.rule import MxRule, converts_fp8
from megatron_lowprec.kernels.quantize.triton_ops import quantize_groups

_SPANS = ["m_start", "m_gate_offset", "m_gate_stride", "n_start", "n_gate_offset", "n_gate_stride"]
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def group_of(first_tile_ptr, tile, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """Number of the group with a tile: the last of those that begin at or before it. Empty groups have no tile."""
    group = tl.arange(0, PADDED)
    first = tl.load(first_tile_ptr + group, mask=group < GROUPS, other=2**31 - 1)
    return tl.sum((first <= tile).to(tl.int32)) - 1


@triton.jit(do_not_specialize=[*_SPANS, "unit"])
def _grouped_mx_kernel(
    out_ptr,
    table_ptr,
    signs_ptr,
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
    """Table, int64 [6, GROUPS]: address, rows, first row of the output, first tile, and two words of the key."""
    GROUP: tl.constexpr = MX.GROUP
    tiles_n = tl.cdiv(N, BN)
    row_tile = tl.program_id(0) // tiles_n
    first_n = (tl.program_id(0) % tiles_n) * BN
    matrix = group_of(table_ptr + 3 * GROUPS, row_tile, GROUPS, PADDED)
    x_ptr = tl.multiple_of(tl.load(table_ptr + matrix).to(tl.pointer_type(ELEMENT)), 16)
    M = tl.load(table_ptr + GROUPS + matrix).to(tl.int32)
    out_ptr += tl.load(table_ptr + 2 * GROUPS + matrix) * N
    first_m = (row_tile - tl.load(table_ptr + 3 * GROUPS + matrix).to(tl.int32)) * BM
    key0 = tl.load(table_ptr + 4 * GROUPS + matrix).to(tl.int32).to(tl.uint32, bitcast=True)
    key1 = tl.load(table_ptr + 5 * GROUPS + matrix).to(tl.int32).to(tl.uint32, bitcast=True)
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
        out, _ = quantize_groups(
            tl.trans(tl.reshape(x, [P, GROUP])).to(tl.float32),
            place(first_m + lane // PER_ROW, m_start, m_gate_offset, m_gate_stride),
            first_n + (lane % PER_ROW) * GROUP,
            n_start,
            n_gate_offset,
            n_gate_stride,
            signs_ptr,
            key0,
            key1,
            step,
            microbatch,
            unit,
            MX,
        )
        out = tl.reshape(tl.trans(out.to(ELEMENT)), [BM, BN])
        tl.store(out_ptr + offsets, out, mask=mask)
    else:
        TALL: tl.constexpr = BM // GROUP
        stacked = tl.arange(0, TALL * BN)
        out, _ = quantize_groups(
            tl.reshape(tl.permute(tl.reshape(x, [TALL, GROUP, BN]), (1, 0, 2)), [GROUP, TALL * BN]).to(tl.float32),
            place(first_n + stacked % BN, n_start, n_gate_offset, n_gate_stride),
            first_m + (stacked // BN) * GROUP,
            m_start,
            m_gate_offset,
            m_gate_stride,
            signs_ptr,
            key0,
            key1,
            step,
            microbatch,
            unit,
            MX,
        )
        out = tl.reshape(tl.permute(tl.reshape(out.to(ELEMENT), [GROUP, TALL, BN]), (1, 0, 2)), [BM, BN])
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


def scaled_signs_of_groups(keys: Sequence[Key], rng_step: torch.Tensor, group: int) -> torch.Tensor:
    """As the reference."""
    device = rng_step.device
    out = torch.empty((len(keys), group), dtype=torch.float32, device=device)
    words = torch.tensor(keys, dtype=torch.int32).to(device, non_blocking=True)
    _signs_of_groups_kernel[(len(keys),)](out, words, rng_step, group**-0.5, GROUP=group, num_warps=1)
    return out


def quantize_mx_groups(
    sources: Sequence[torch.Tensor],
    rule: MxRule,
    *,
    columnwise: bool,
    keys: Sequence[Key],
    signs: torch.Tensor | None = None,
    rng_step: torch.Tensor,
    spans: tuple[ShardSlice, ShardSlice] = (WHOLE, WHOLE),
) -> torch.Tensor:
    """As the reference."""
    (_, N), dtype, device = sources[0].shape, sources[0].dtype, sources[0].device
    block = 0 if signs is None else signs.shape[1]
    kernel, tile_rows, tile_columns, unit = _specialized(
        rule, block, columnwise, dtype, len(sources), converts_fp8(device)
    )
    rows = np.array([source.shape[0] for source in sources], dtype=np.int64)
    written = -(-rows // block) * block if block and columnwise else rows
    tiles = -(-rows // tile_rows)
    table = np.empty((6, len(sources)), dtype=np.int64)
    table[0] = [source.data_ptr() for source in sources]
    table[1], table[2], table[3] = rows, written.cumsum() - written, tiles.cumsum() - tiles
    table[4:] = np.array(keys, dtype=np.int64).T
    out = torch.empty((int(written.sum()), N), dtype=dtype, device=device)
    programs = int(tiles.sum()) * -(-N // tile_columns)
    if programs:
        on_device = torch.from_numpy(table).to(device, non_blocking=True)
        arguments = (out, on_device, out if signs is None else signs, N, rng_step, *spans[0], *spans[1], unit)
        kernel.launch(programs, device, arguments, (N % 16 == 0, N == 1))
    return out


@lru_cache(maxsize=256)
def _specialized(
    rule: MxRule, block: int, columnwise: bool, dtype: torch.dtype, groups: int, converts: bool
) -> tuple[Specialized, int, int, int]:
    """The kernel, the rows and columns of its tile, and its argument ``unit``."""
    constants = rule.constants(
        block, rows=not columnwise, columns=columnwise, packed=False, codes=False, converts=converts
    )
    stochastic = rule.rounding == "stochastic"
    group, warps = constants.GROUP, 1 + (block > 0)
    rows, columns = (group, 32 if block and stochastic else 64) if columnwise else (8 if block else 4, 8 * group)
    options: dict[str, Any] = {"num_warps": 1 if columnwise and block and stochastic else warps}
    kernel = Specialized(
        _grouped_mx_kernel,
        {
            "MX": constants,
            "ELEMENT": _DTYPES[dtype],
            "GROUPS": groups,
            "PADDED": triton.next_power_of_2(groups),
            "BM": rows,
            "BN": columns,
        },
        # a contracted multiply-add rounds once, the reference twice
        enable_fp_fusion=False,
        **options,
    )
    return kernel, rows, columns, 1 << max(0, 23 - constants.MANTISSA - constants.RANDOM_BITS)
