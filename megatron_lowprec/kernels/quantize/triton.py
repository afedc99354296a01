"""MX quantization in one pass: Hadamard transform, block scales, rounding; along rows, along columns, or both.

A program holds groups of consecutive entries as a tensor [GROUP, P] with a whole group in each thread, so that the
transform's butterflies, the block maxima and the draws (8 of one Philox call) move no data between threads. The tile is
read in 16-byte pieces and goes through shared memory once each way, as bf16. Bits equal ``reference.py``: the same fp32
operations in the same order, none contracted, and rounding on the bits of an fp32 number.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.launch import launch
from megatron_lowprec.kernels.philox.reference import Span
from megatron_lowprec.kernels.philox.triton import draw_bits, place
from megatron_lowprec.kernels.quantize.triton_ops import MX_BLOCK, quantize_groups

_RULES = {"floor": 0, "round_up": 1, "ceil": 2, "even": 3}
_ROUNDINGS = {"nearest_even": 0, "half_away": 1, "stochastic": 2}


_KEYS = ["rk0", "rk1", "ck0", "ck1"]
_SPANS = ["m_start", "m_seam", "m_jump", "n_start", "n_seam", "n_jump"]


@triton.jit(do_not_specialize=[*_KEYS, *_SPANS, "unit"])
def _mx_kernel(
    x_ptr,
    row_ptr,
    col_ptr,
    row_signs_ptr,
    col_signs_ptr,
    M,
    padded_M,
    N,
    stride,
    rk0,
    rk1,
    ck0,
    ck1,
    moment_ptr,
    m_start,
    m_seam,
    m_jump,
    n_start,
    n_seam,
    n_jump,
    unit,
    PACKED: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    ALONG_COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    HADAMARD: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    RULE: tl.constexpr,
    ROUNDING: tl.constexpr,
    RANDOM_BITS: tl.constexpr,
    HEADROOM: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    first_m = (tile // tiles_n) * BM
    first_n = (tile % tiles_n) * BN
    rows = first_m + tl.arange(0, BM)
    cols = first_n + tl.arange(0, BN)
    offsets = rows.to(tl.int64)[:, None] * stride + cols[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    step = tl.load(moment_ptr).to(tl.uint32, bitcast=True)
    microbatch = tl.load(moment_ptr + 1).to(tl.uint32, bitcast=True)
    out_offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]
    if ALONG_ROWS:
        P: tl.constexpr = BM * BN // GROUP
        PER_ROW: tl.constexpr = BN // GROUP
        group = tl.arange(0, P)
        if PACKED:  # two bf16 numbers a word, each widened by one integer operation
            pairs = first_n // 2 + tl.arange(0, BN // 2)
            words = tl.load(
                x_ptr.to(tl.pointer_type(tl.int32)) + rows.to(tl.int64)[:, None] * (stride // 2) + pairs[None, :],
                mask=(rows < M)[:, None] & (pairs < N // 2)[None, :],
                other=0,
            )
            words = tl.trans(tl.reshape(words, [P, GROUP // 2]))
            low = (words << 16).to(tl.float32, bitcast=True)
            high = (words & -65536).to(tl.float32, bitcast=True)
            y = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [GROUP, P])
        else:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
            y = tl.trans(tl.reshape(x, [P, GROUP])).to(tl.float32)
        row = place(first_m + group // PER_ROW, m_start, m_seam, m_jump)
        first_column = first_n + (group % PER_ROW) * GROUP
        out, _ = quantize_groups(
            y,
            row,
            first_column,
            n_start,
            n_seam,
            n_jump,
            row_signs_ptr,
            rk0.to(tl.uint32, bitcast=True),
            rk1.to(tl.uint32, bitcast=True),
            step,
            microbatch,
            unit,
            GROUP,
            HADAMARD,
            MANTISSA,
            MIN_EXPONENT,
            MAX,
            MAX_EXPONENT,
            RULE,
            ROUNDING,
            RANDOM_BITS,
            HEADROOM,
        )
        out = tl.reshape(tl.trans(out.to(row_ptr.dtype.element_ty)), [BM, BN])
        tl.store(row_ptr + out_offsets, out, mask=mask)
    if ALONG_COLUMNS:
        # where rows came first, this read comes from the cache: registers for the tile are better spent on warps
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
        # BM // GROUP groups, one below the other
        TALL: tl.constexpr = BM // GROUP
        y = tl.reshape(tl.permute(tl.reshape(x, [TALL, GROUP, BN]), (1, 0, 2)), [GROUP, TALL * BN]).to(tl.float32)
        lane = tl.arange(0, TALL * BN)
        row = place(first_n + lane % BN, n_start, n_seam, n_jump)
        first_column = first_m + (lane // BN) * GROUP
        out, _ = quantize_groups(
            y,
            row,
            first_column,
            m_start,
            m_seam,
            m_jump,
            col_signs_ptr,
            ck0.to(tl.uint32, bitcast=True),
            ck1.to(tl.uint32, bitcast=True),
            step,
            microbatch,
            unit,
            GROUP,
            HADAMARD,
            MANTISSA,
            MIN_EXPONENT,
            MAX,
            MAX_EXPONENT,
            RULE,
            ROUNDING,
            RANDOM_BITS,
            HEADROOM,
        )
        out = out.to(col_ptr.dtype.element_ty)
        out = tl.reshape(tl.permute(tl.reshape(out, [GROUP, TALL, BN]), (1, 0, 2)), [BM, BN])
        tl.store(col_ptr + out_offsets, out, mask=(rows < padded_M)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["k0", "k1"])
def _signs_kernel(out_ptr, k0, k1, moment_ptr, scale, GROUP: tl.constexpr):
    zero = tl.zeros([1], tl.int32)
    bits = draw_bits(
        zero.to(tl.uint32),
        zero,
        k0.to(tl.uint32, bitcast=True),
        k1.to(tl.uint32, bitcast=True),
        tl.load(moment_ptr).to(tl.uint32, bitcast=True),
        tl.load(moment_ptr + 1).to(tl.uint32, bitcast=True),
        0,
        GROUP,
        0,
        GROUP,
    )
    signs = tl.reshape(1.0 - 2.0 * (bits >> 15).to(tl.float32), [GROUP])
    tl.store(out_ptr + tl.arange(0, GROUP), signs * scale)


@dataclass(frozen=True)
class Direction:
    """One way to quantize a matrix: the key of its rounding, and its transform.

    Attributes:
        key: Philox key of stochastic rounding.
        signs: fp32 [g] of +-1/sqrt(g) for the Hadamard transform, from ``scaled_signs``; None for no transform.
    """

    key: tuple[int, int] = (0, 0)
    signs: torch.Tensor | None = None


def scaled_signs(key: tuple[int, int], moment: torch.Tensor, group: int) -> torch.Tensor:
    """fp32 [group] of random signs times fl32(1/sqrt(group)), from the stream of ``philox/reference.py``.

    Args:
        key: Philox key.
        moment: int32 [2], (step, microbatch), on the device of the result.
    """
    out = torch.empty(group, dtype=torch.float32, device=moment.device)
    arguments = (out, *map(_signed, key), moment, group**-0.5)
    launch(_signs_kernel, (1, 1, 1), arguments, {"GROUP": group}, specialized_on=moment.device, num_warps=1)
    return out


def quantize_mx(
    x: torch.Tensor,
    fmt: Format,
    *,
    rows: Direction | None = None,
    columns: Direction | None = None,
    scale_rule: str,
    rounding: str = "nearest_even",
    random_bits: int = 16,
    headroom: float = 1.0,
    moment: torch.Tensor,
    spans: tuple[Span, Span] = (Span(), Span()),
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Dequantized MX operands of a matrix, along its rows, along its columns, or both from one read.

    Args:
        x: [M, N] bf16 or fp32, the last dimension contiguous; N a multiple of 32 and of len(signs) where ``rows`` is
            given. Any M: columns are padded with zeros inside, which change no scale.
        rows: blocks along the last dimension (the operand x); None to leave it out.
        columns: blocks along the first (the operand x.T); None to leave it out.
        scale_rule, rounding, random_bits, headroom: as in ``recipe.schema.QuantSpec``; one transform size for both.
        moment: int32 [2] on the device of x: step and microbatch of the draws. In memory, not an argument, so that a
            captured CUDA graph draws anew in each replay.
        spans: where the rows and the columns of x lie in the unsharded matrix.

    Returns:
        along rows [M, N]; along columns [M rounded up to whole groups where transformed, else M, N]; each in the dtype
        of x and row-major, or None. Headroom is left in.
    """
    if rows is not None and columns is not None and rows.signs is not None and rounding == "stochastic":
        # bound by arithmetic: two programs that each keep a group in registers beat one that reads less
        options = {"scale_rule": scale_rule, "rounding": rounding, "random_bits": random_bits, "headroom": headroom}
        first, _ = quantize_mx(x, fmt, rows=rows, moment=moment, spans=spans, **options)  # type: ignore[arg-type]
        _, second = quantize_mx(x, fmt, columns=columns, moment=moment, spans=spans, **options)  # type: ignore[arg-type]
        return first, second
    M, N = x.shape
    directions = (rows, columns)
    signs = next(direction.signs for direction in directions if direction is not None)
    group = MX_BLOCK.value if signs is None else signs.numel()
    # a transformed group is dense even where its entries were padding
    padded_M = M if signs is None else triton.cdiv(M, group) * group
    outputs = [
        None if direction is None else torch.empty((height, N), dtype=x.dtype, device=x.device)
        for direction, height in zip(directions, (M, padded_M), strict=True)
    ]
    words = [word for direction in directions for word in (direction or Direction()).key]
    # the kernel does not touch what a direction that is left out would write or read
    unused = next(out for out in outputs if out is not None)
    signs_given = [direction.signs if direction is not None else None for direction in directions]
    stochastic = rounding == "stochastic"
    tiling = _tiling(group, rows is not None, columns is not None, signs is not None, stochastic)
    sizes = (M, padded_M, N, x.stride(0))
    arguments = (
        x,
        *(unused if out is None else out for out in outputs),
        *(unused if vector is None else vector for vector in signs_given),
        *sizes,
        *map(_signed, words),
        moment,
        *spans[0],
        *spans[1],
        1 << max(0, 23 - fmt.mantissa_bits - random_bits),
    )
    constants = {
        "PACKED": x.dtype == torch.bfloat16 and (N | x.stride(0) | x.data_ptr() // 2) % 2 == 0,
        "ALONG_ROWS": rows is not None,
        "ALONG_COLUMNS": columns is not None,
        "BM": tiling.rows,
        "BN": tiling.columns,
        "GROUP": group,
        "HADAMARD": signs is not None,
        "MANTISSA": fmt.mantissa_bits,
        "MIN_EXPONENT": fmt.min_exponent,
        "MAX": fmt.max,
        "MAX_EXPONENT": fmt.max_exponent,
        "RULE": _RULES[scale_rule],
        "ROUNDING": _ROUNDINGS[rounding],
        "RANDOM_BITS": random_bits,
        "HEADROOM": headroom,
    }
    launch(
        _mx_kernel,
        (triton.cdiv(M, tiling.rows) * triton.cdiv(N, tiling.columns), 1, 1),
        arguments,
        constants,
        specialized_on=(x.device, x.dtype, x.data_ptr() % 16 == 0, *((size % 16 == 0, size == 1) for size in sizes)),
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        # a contracted multiply-add rounds once where the reference rounds twice
        enable_fp_fusion=False,
    )
    return outputs[0], outputs[1]


class _Tiling(NamedTuple):
    rows: int
    columns: int
    warps: int
    registers: int | None  # a thread's limit, where more resident warps are worth some spilling


def _tiling(group: int, rows: bool, columns: bool, transformed: bool, stochastic: bool) -> _Tiling:
    """A program's tile, about a group a thread, with whole groups in each direction; fastest of those tried on an H200.

    Few warps a program, since they share nothing; see docs/kernels.md for what was tried.
    """
    limit = 128 if transformed and stochastic and group <= 64 else None
    if rows and columns:
        if transformed:
            return _Tiling(group, max(64, group), 2, limit)
        return _Tiling(group, 64, 2, limit) if stochastic else _Tiling(group, 128, 4, limit)
    if columns:
        return (
            _Tiling(group, 32, 1, limit) if stochastic and transformed else _Tiling(group, 64, 1 + transformed, limit)
        )
    return _Tiling(8, group * 8, 2, limit) if transformed else _Tiling(4, group * 8, 1, limit)


def _signed(word: int) -> int:
    """A 32-bit word as Triton's int32 argument, so that no value changes a kernel's signature."""
    return word - (1 << 32) if word >= 1 << 31 else word
