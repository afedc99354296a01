"""Kernel of MX quantization in one pass: Hadamard transform, block scales and rounding.

A program holds groups of consecutive entries as a tensor [GROUP, P], one whole group in each thread. The transform's
butterflies, block maxima and draws (8 of one Philox call) then exchange no data between threads. The tile is read in
16-byte vectors and crosses shared memory once in each direction, as bf16. Bits equal ``reference.py``: the same fp32
operations in the same order, none contracted, and rounding on the bits of an fp32 number.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.kernels.philox.triton import place
from megatron_lowprec.kernels.quantize.rule import MxRule
from megatron_lowprec.kernels.quantize.tilings import tilings_of
from megatron_lowprec.kernels.quantize.triton_coded import tensor_amax, write_tensor_scale
from megatron_lowprec.kernels.quantize.triton_groups import quantize_groups
from megatron_lowprec.kernels.quantize.triton_ops import groups_in_threads, nvfp4_tile, widened
from megatron_lowprec.kernels.tuning import Tuned

_KEYS = ["rk0", "rk1", "ck0", "ck1", "row_scale_k0", "row_scale_k1", "col_scale_k0", "col_scale_k1"]
_SPANS = ["m_start", "m_gate_offset", "m_gate_stride", "n_start", "n_gate_offset", "n_gate_stride"]


@triton.jit(
    do_not_specialize=["M", "padded_M", *_KEYS, *_SPANS, "unit"],
    do_not_specialize_on_alignment=["row_amax_ptr", "col_amax_ptr", "coded_scale_ptr", "coded_tensor_scale_ptr"],
)
def _mx_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    row_signs_ptr,
    col_signs_ptr,
    row_amax_ptr,
    col_amax_ptr,
    tensor_scale_ptr,
    M,
    padded_M,
    N,
    stride,
    row_pitch,
    col_pitch,
    rk0,
    rk1,
    ck0,
    ck1,
    row_scale_k0,
    row_scale_k1,
    col_scale_k0,
    col_scale_k1,
    rng_step_ptr,
    m_start,
    m_gate_offset,
    m_gate_stride,
    n_start,
    n_gate_offset,
    n_gate_stride,
    unit,
    coded_ptr,
    coded_scale_ptr,
    coded_tensor_scale_ptr,
    MX: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Writes dequantized tiles if ``MX.CODE_BITS`` is 0, else codes and scale bytes, columnwise ones transposed.

    ``row_pitch`` and ``col_pitch`` are the bytes of a row of codes. With a tensor scale, the decode scales of rows and
    columns are written too. ``coded`` is the ``CodedMatrix`` that ``MX.CODED`` reads and ``MX.BESIDE`` writes.
    """
    # two 4-bit codes share a byte
    SHARE: tl.constexpr = 2 if MX.CODE_BITS == 4 else 1
    GROUP: tl.constexpr = MX.GROUP
    BLOCKS: tl.constexpr = GROUP // MX.BLOCK
    tl.static_assert(BM == GROUP or not MX.ALONG_COLUMNS)
    tiles_n = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    first_m = (tile // tiles_n) * BM
    first_n = (tile % tiles_n) * BN
    rows = first_m + tl.arange(0, BM)
    cols = first_n + tl.arange(0, BN)
    offsets = rows.to(tl.int64)[:, None] * stride + cols[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    step = tl.load(rng_step_ptr).to(tl.uint32, bitcast=True)
    microbatch = tl.load(rng_step_ptr + 1).to(tl.uint32, bitcast=True)
    out_offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]
    DTYPE: tl.constexpr = tl.float32 if MX.CODED else x_ptr.dtype.element_ty
    tl.static_assert(not MX.CODED or not MX.ALONG_ROWS)
    if MX.ALONG_ROWS:
        row_amax = tensor_amax(row_amax_ptr, MX)
        write_tensor_scale(tensor_scale_ptr, row_amax, tile == 0, MX)
        P: tl.constexpr = BM * BN // GROUP
        PER_ROW: tl.constexpr = BN // GROUP
        group = tl.arange(0, P)
        if MX.PACKED:  # two bf16 numbers a word, each widened by one integer operation
            words_ptr = x_ptr.to(tl.pointer_type(tl.int32))
            if GROUP == 16:  # a thread reads a group in two vectors
                m, pair = first_m + group // PER_ROW, first_n // 2 + (group % PER_ROW) * 8
                words_ptr += m.to(tl.int64)[:, None] * (stride // 2) + pair[:, None] + tl.arange(0, 4)[None, :]
                inside = ((m < M) & (pair < N // 2))[:, None]
                first, second = tl.load(words_ptr, mask=inside, other=0), tl.load(words_ptr + 4, mask=inside, other=0)
                words = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [P, GROUP // 2])
            else:
                pairs = first_n // 2 + tl.arange(0, BN // 2)
                words_ptr += rows.to(tl.int64)[:, None] * (stride // 2) + pairs[None, :]
                words = tl.load(words_ptr, mask=(rows < M)[:, None] & (pairs < N // 2)[None, :], other=0)
                words = tl.reshape(words, [P, GROUP // 2])
            y = tl.reshape(tl.permute(widened(tl.trans(words)), (0, 2, 1)), [GROUP, P])
        else:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
            y = tl.trans(tl.reshape(x, [P, GROUP])).to(tl.float32)
        m = first_m + group // PER_ROW
        first_column = first_n + (group % PER_ROW) * GROUP
        out, byte, beside = quantize_groups(
            y,
            place(m, m_start, m_gate_offset, m_gate_stride),
            first_column,
            n_start,
            n_gate_offset,
            n_gate_stride,
            row_signs_ptr,
            row_amax,
            rk0.to(tl.uint32, bitcast=True),
            rk1.to(tl.uint32, bitcast=True),
            row_scale_k0.to(tl.uint32, bitcast=True),
            row_scale_k1.to(tl.uint32, bitcast=True),
            step,
            microbatch,
            unit,
            MX,
            MX.HADAMARD and (MX.PLAIN & 1) == 0,
            DTYPE,
        )
        if MX.CODE_BITS == 0:
            out = tl.reshape(tl.trans(out.to(row_ptr.dtype.element_ty)), [BM, BN])
            tl.store(row_ptr + out_offsets, out, mask=mask)
        else:
            inside = ((m < M) & (first_column < N))[None, :]
            byte_column = (tile % tiles_n) * (BN // SHARE) + (group % PER_ROW) * (GROUP // SHARE)
            first = (m.to(tl.int64) * row_pitch + byte_column)[None, :]
            tl.store(row_ptr + first + tl.arange(0, GROUP // SHARE)[:, None], out, mask=inside)
            block = (m.to(tl.int64) * (N // MX.BLOCK) + first_column // MX.BLOCK)[None, :]
            tl.store(row_scale_ptr + block + tl.arange(0, BLOCKS)[:, None], byte.to(tl.uint8), mask=inside)
        if MX.BESIDE:  # a group is a block
            inside = ((m < M) & (first_column < N))[None, :]
            first = (m.to(tl.int64) * (N // 2) + first_column // 2)[None, :]
            tl.store(coded_ptr + first + tl.arange(0, GROUP // 2)[:, None], beside, mask=inside)
            block = (m.to(tl.int64) * (N // GROUP) + first_column // GROUP)[None, :]
            tl.store(coded_scale_ptr + block, byte.to(tl.uint8), mask=inside)
    if MX.ALONG_COLUMNS:
        col_amax = tensor_amax(col_amax_ptr, MX)
        write_tensor_scale(tensor_scale_ptr + 1, col_amax, tile == 0, MX)
        # after the rowwise part this read hits the cache: registers for the tile are better spent on warps
        if MX.CODED:
            y = nvfp4_tile(x_ptr, coded_scale_ptr, coded_tensor_scale_ptr, rows, first_n, M, N, BN)
        else:
            y = tl.load(x_ptr + offsets, mask=mask, other=0.0)
        y = groups_in_threads(y) if MX.BLOCK_ROWS == 1 and (MX.SCALE_MANTISSA > 0 or GROUP == 128) else y.to(tl.float32)
        n = cols
        first_column = tl.full([BN], first_m, tl.int32)
        out, byte, _ = quantize_groups(
            y,
            place(n, n_start, n_gate_offset, n_gate_stride),
            first_column,
            m_start,
            m_gate_offset,
            m_gate_stride,
            col_signs_ptr,
            col_amax,
            ck0.to(tl.uint32, bitcast=True),
            ck1.to(tl.uint32, bitcast=True),
            col_scale_k0.to(tl.uint32, bitcast=True),
            col_scale_k1.to(tl.uint32, bitcast=True),
            step,
            microbatch,
            unit,
            MX,
            MX.HADAMARD and (MX.PLAIN & 2) == 0,
            DTYPE,
        )
        if MX.CODE_BITS == 0:
            out = out.to(col_ptr.dtype.element_ty)
            tl.store(col_ptr + out_offsets, out, mask=(rows < padded_M)[:, None] & (cols < N)[None, :])
        else:
            inside = ((n < N) & (first_column < padded_M))[None, :]
            byte_column = (tile // tiles_n) * (GROUP // SHARE)
            first = (n.to(tl.int64) * col_pitch + byte_column)[None, :]
            tl.store(col_ptr + first + tl.arange(0, GROUP // SHARE)[:, None], out, mask=inside)
            block = (n.to(tl.int64) * (padded_M // MX.BLOCK) + first_column // MX.BLOCK)[None, :]
            tl.store(col_scale_ptr + block + tl.arange(0, BLOCKS)[:, None], byte.to(tl.uint8), mask=inside)


Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, stride and dtype."""


class MxKernel:
    """The kernel for one rule and arguments of ``MxRule.constants``, with tuned tiling.

    Attributes:
        specialized: by tiling.
        tuned: the tiling.
        unit: the kernel's argument.
        codes_a_byte: 0 for dequantized data.
    """

    def __init__(self, rule: MxRule, *key: Any) -> None:
        constants = rule.constants(*key)
        rows, columns, codes = constants.ALONG_ROWS, constants.ALONG_COLUMNS, constants.CODE_BITS > 0
        self._block, self._group, self._scales_tensor = rule.block, constants.GROUP, rule.target is not None
        self._rows, self._columns, self._beside = rows, columns, constants.BESIDE
        assert not self._beside or (rule.makes_nvfp4 and rows and not columns and rule.block == constants.GROUP)
        self._pads = codes or (constants.HADAMARD and not constants.PLAIN & 2)  # a transform makes a group dense
        self.codes_a_byte = 0 if not codes else 2 if rule.fmt.bits == 4 else 1
        self._code_dtype = torch.uint8 if rule.fmt.bits <= 8 else torch.int16
        self.unit = 1 << max(0, 23 - constants.MANTISSA - constants.RANDOM_BITS)
        tilings = tilings_of(self._group, rows, columns, constants.HADAMARD, rule.rounding == "stochastic")
        self.specialized = {
            tiling: Specialized(
                _mx_kernel,
                {"MX": constants, "BM": tiling.rows, "BN": tiling.columns},
                num_warps=tiling.warps,
                maxnreg=tiling.registers,
                # a contracted multiply-add rounds once, the reference twice
                enable_fp_fusion=False,
            )
            for tiling in tilings
        }
        self.tuned = Tuned(f"{_mx_kernel.__name__} {constants.tuning_name()}", tilings)

    def layouts(self, M: int, N: int, dtype: torch.dtype) -> tuple[int, tuple[Layout | None, ...]]:
        """M padded, and the layouts that ``quantize_mx`` allocates."""
        # codes of a part of a group would be written into the next row
        assert not self._rows or N % self._group == 0, f"rows of {N} entries are no whole groups of {self._group}"
        padded_M = -(-M // self._group) * self._group if self._pads else M
        row_data = row_scale = column_data = column_scale = packed = of_blocks = None
        if share := self.codes_a_byte:
            if self._rows:
                row_data = _contiguous(M, N // share, self._code_dtype)
                row_scale = _contiguous(M, N // self._block, torch.uint8)
            if self._columns:
                column_data = _contiguous(N, padded_M // share, self._code_dtype)
                column_scale = _contiguous(N, padded_M // self._block, torch.uint8)
        else:
            row_data = _contiguous(M, N, dtype) if self._rows else None
            column_data = _contiguous(padded_M, N, dtype) if self._columns else None
        if self._beside:
            packed, of_blocks = (_contiguous(M, N // each, torch.uint8) for each in (2, 16))
        decode = ((2, 1, 1), (1, 1, 1), torch.float32) if self._scales_tensor else None
        return padded_M, (row_data, row_scale, column_data, column_scale, decode, packed, of_blocks)


def _contiguous(rows: int, columns: int, dtype: torch.dtype) -> Layout:
    return (rows, columns), (columns, 1), dtype
