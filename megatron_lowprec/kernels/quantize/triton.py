"""MX quantization in one pass: Hadamard transform, block scales and rounding; rowwise, columnwise or both.

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
from megatron_lowprec.kernels.philox.reference import WHOLE, ShardSlice
from megatron_lowprec.kernels.philox.triton import place
from megatron_lowprec.kernels.quantize.rule import CodedMatrix, Direction, MxCast, MxRule, converts_fp8
from megatron_lowprec.kernels.quantize.tilings import LONGEST_FUSED, Tiling, tilings_of
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


_NOTHING = Direction()
_PITCHES = slice(14, 16)  # of the kernel's arguments


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
        x: [M, N] bf16 or fp32, the last dimension contiguous; N a multiple of ``rule.block`` and of len(signs) if
            ``rows`` is given. Any M: the kernel zero-pads columns, which changes no scale. For ``columns``
            only, a coded one.
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
    if rows is not None and columns is not None and _takes_two_kernels(rule, rows, columns, codes):
        by_row = quantize_mx(x, rule, rows=rows, codes=codes, **others)
        by_column = quantize_mx(x, rule, columns=columns, codes=codes, **others)
        return by_row._replace(**{name: made for name, made in by_column._asdict().items() if made is not None})
    coded, read = (x, x.codes) if isinstance(x, CodedMatrix) else (None, x)
    kernel, dtype = _mx_kernel_for(read, rule, rows, columns, codes, whole, coded is not None, beside), out_dtype
    (M, N), stride, device, dtype = x.shape, read.stride(0), read.device, dtype or read.dtype
    cast, arguments = kernel.arguments(read, (M, N), dtype, rows, columns, rng_step, spans, coded)
    specialized_on = (read.dtype, dtype, read.data_ptr() % 16 == 0, N % 16 == 0, stride % 16 == 0, N == 1, stride == 1)
    if codes:  # a pitch is a multiple of 8 or more under blocks of 16
        specialized_on += tuple(pitch % 16 == 0 for pitch in arguments[_PITCHES])

    def launch(tiling: Tiling) -> None:
        kernel.specialized[tiling].launch(tiling.programs(M, N), device, arguments, specialized_on)

    tiling = kernel.tuned.choose(M * N, launch, device)
    kernel.specialized[tiling].launch(tiling.programs(M, N), device, arguments, specialized_on)
    return cast


def _takes_two_kernels(rule: MxRule, rows: Direction, columns: Direction, codes: bool) -> bool:
    """Whether two kernels, with one group in registers each, beat one kernel that reads less."""
    blocks = [way.signs.numel() for way in (rows, columns) if way.signs is not None]
    if max(blocks, default=0) > LONGEST_FUSED:
        # a tile of whole groups in both directions has several a thread, which spill and compile for minutes
        return True
    # bound by arithmetic
    return rows.signs is not None and (rule.rounding == "stochastic" or rule.options.group > 0) and not codes


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


def _mx_kernel_for(
    x: torch.Tensor, rule: MxRule, rows: Direction | None, columns: Direction | None, codes: bool, *others: bool
) -> "_MxKernel":
    of_rows, of_columns = (rows or _NOTHING).signs, (columns or _NOTHING).signs
    signs = of_columns if of_rows is None else of_rows
    packed = x.dtype == torch.bfloat16 and (x.shape[1] | x.stride(0) | x.data_ptr() // 2) % 2 == 0
    block = 0 if signs is None else signs.numel()
    plain = (rows is not None and of_rows is None) + 2 * (columns is not None and of_columns is None) if block else 0
    lanes_first = columns is not None and columns.lanes_first
    ways, converts = (rows is not None, columns is not None), converts_fp8(x.device)
    key = (block, *ways, packed, codes, converts, plain, lanes_first, *others)
    found = rule.kernels.get(key)
    if found is None:
        found = rule.kernels[key] = _MxKernel(rule, *key)
    return found


class _MxKernel:
    """The kernel for one rule and arguments of ``MxRule.constants``, with tuned tiling."""

    def __init__(self, rule: MxRule, *key: Any) -> None:
        constants = rule.constants(*key)
        rows, columns, codes = constants.ALONG_ROWS, constants.ALONG_COLUMNS, constants.CODE_BITS > 0
        self._block, self._group, self._scales_tensor = rule.block, constants.GROUP, rule.target is not None
        self._beside = constants.BESIDE
        assert not self._beside or (rule.makes_nvfp4 and rows and not columns and rule.block == constants.GROUP)
        self._pads = codes or (constants.HADAMARD and not constants.PLAIN & 2)  # a transform makes a group dense
        self._codes_a_byte = 0 if not codes else 2 if rule.fmt.bits == 4 else 1
        self._code_dtype = torch.uint8 if rule.fmt.bits <= 8 else torch.int16
        self._unit = 1 << max(0, 23 - constants.MANTISSA - constants.RANDOM_BITS)
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

    def arguments(
        self,
        x: torch.Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
        rows: Direction | None,
        columns: Direction | None,
        rng_step: torch.Tensor,
        spans: tuple[ShardSlice, ShardSlice],
        coded: CodedMatrix | None,
    ) -> tuple[MxCast, tuple[Any, ...]]:
        """Empty outputs and all launch arguments. ``x``: the memory that is read."""
        (M, N), device, share = shape, x.device, self._codes_a_byte
        # codes of a part of a group would be written into the next row
        assert rows is None or N % self._group == 0, f"rows of {N} entries are no whole groups of {self._group}"
        padded_M = -(-M // self._group) * self._group if self._pads else M
        row_data = row_scale = column_data = column_scale = written = None
        if share:
            if rows is not None:
                row_data = torch.empty((M, N // share), dtype=self._code_dtype, device=device)
                row_scale = torch.empty((M, N // self._block), dtype=torch.uint8, device=device)
            if columns is not None:
                written = column_data = torch.empty((N, padded_M // share), dtype=self._code_dtype, device=device)
                column_scale = torch.empty((N, padded_M // self._block), dtype=torch.uint8, device=device)
            pitches = (N // share, padded_M // share)
        else:
            if rows is not None:
                row_data = torch.empty((M, N), dtype=dtype, device=device)
            if columns is not None:
                written = torch.empty((padded_M, N), dtype=dtype, device=device)
                column_data = written.t()
            pitches = (0, 0)
        decode = torch.empty((2, 1, 1), dtype=torch.float32, device=device) if self._scales_tensor else None
        scales = (None, None) if decode is None else decode.unbind()
        made = MxCast(
            row_data,
            row_scale,
            column_data,
            column_scale,
            None if rows is None else scales[0],
            None if columns is None else scales[1],
        )
        if self._beside:
            assert scales[0] is not None
            packed, of_blocks = (torch.empty((M, N // each), dtype=torch.uint8, device=device) for each in (2, 16))
            coded = CodedMatrix(packed, of_blocks, scales[0])
            made = made._replace(beside=coded)
        rows, columns = rows or _NOTHING, columns or _NOTHING
        # placeholders for an omitted direction, which the kernel does not access
        arguments = (
            x,
            *(x if out is None else out for out in (row_data, row_scale, written, column_scale)),
            x if rows.signs is None else rows.signs,
            x if columns.signs is None else columns.signs,
            *(x if out is None else out for out in (rows.amax, columns.amax, decode)),
            M,
            padded_M,
            N,
            x.stride(0),
            *pitches,
            *rows.key,
            *columns.key,
            *rows.scale_key,
            *columns.scale_key,
            rng_step,
            *spans[0],
            *spans[1],
            self._unit,
            *(coded or (x, x, x)),
        )
        return made, arguments
