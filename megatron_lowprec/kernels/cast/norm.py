"""A norm whose output goes into FP8 operands, not into memory; bits equal to ``kernels.layernorm`` and then a cast.

A program has some rows: it writes their statistics as the norm's kernel does, row by row over all of its threads, and
then casts the rows a tile at a time as the cast's kernel does, reading x again from the cache. That needs the rows in
flight to fit there: a GPU runs a few programs a multiprocessor, which go on to other rows. bf16 in and both ways out
are 4 bytes an entry, where norm and cast by themselves move 8.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.cast.rule import CastConstants
from megatron_lowprec.kernels.cast.source import Fp8Cast, NormSource
from megatron_lowprec.kernels.cast.tiles import cast_words
from megatron_lowprec.kernels.contract.native import ROW_MULTIPLE, ScaledOperand
from megatron_lowprec.kernels.launch import Specialized
from megatron_lowprec.kernels.layernorm.triton import store_statistics
from megatron_lowprec.kernels.layernorm.triton import tiling as norm_tiling
from megatron_lowprec.kernels.tuning import LARGE_ENOUGH, fastest


@triton.jit(do_not_specialize=["T"])
def _norm_cast_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    observed_ptr,
    T,
    padded_T,
    eps,
    CAST: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    source = (x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr)
    for tile_m in range(tl.program_id(0), tl.cdiv(padded_T, BM), tl.num_programs(0)):
        for start in range(0, BM, ROWS):
            store_statistics(x_ptr, mean_ptr, rstd_ptr, tile_m * BM + start, T, eps, WIDTH, CAST.KIND == 4, ROWS, BLOCK)
        tl.debug_barrier()  # other threads read what was written here
        for tile_n in range(tl.cdiv(WIDTH, BN)):
            cast_words(
                source, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, observed_ptr, x_ptr,
                tile_m, tile_n, T, T, padded_T, WIDTH, WIDTH, CAST, BM, BN, BN
            )  # fmt: skip


class _Tiling(NamedTuple):
    rows: int  # of a program at once
    entries: int  # of a thread in each of its four tiles of words
    warps: int  # of a multiprocessor


# 16 warps with 32 rows each time: 34 MB of x in flight on 132 multiprocessors, whatever the width
_TILINGS = (_Tiling(32, 8, 16), _Tiling(32, 4, 16), _Tiling(32, 4, 32), _Tiling(64, 8, 8), _Tiling(64, 8, 16))


class NormCastKernel:
    """The kernel for a norm of ``width`` and a cast's ``constants``, in the tiling that is fastest."""

    def __init__(self, constants: CastConstants, width: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rows, self._columns = constants.ALONG_ROWS, constants.ALONG_COLUMNS
        norm = norm_tiling(width)
        self._warps = norm.warps
        sizes = {"WIDTH": width, "ROWS": norm.rows, "BLOCK": triton.next_power_of_2(width)}
        self._name = f"{_norm_cast_kernel.__name__} {constants._asdict() | sizes}"
        self._specialized = {
            tiling: Specialized(
                _norm_cast_kernel,
                {"CAST": constants}
                | sizes
                | {"BM": tiling.rows, "BN": norm.warps * 32 * tiling.entries // (tiling.rows // 4)},
                num_warps=norm.warps,
            )
            for tiling in _TILINGS
        }
        self._tiling: _Tiling | None = None

    def run(self, source: NormSource, amax: torch.Tensor, observed: torch.Tensor | None) -> Fp8Cast:
        """Allocate and launch; see ``cast_fp8``."""
        x, weight, bias, mean, rstd = source.x, source.weight, source.bias, source.mean, source.rstd
        (T, width), device = x.shape, x.device
        padded_T = -(-T // ROW_MULTIPLE) * ROW_MULTIPLE
        by_rows = self._operand(T, width, device) if self._rows else None
        by_columns = self._operand(width, padded_T, device) if self._columns else None
        arguments = (
            x,
            weight,
            weight if bias is None else bias,
            rstd if mean is None else mean,
            rstd,
            *((x, x) if by_rows is None else (by_rows.elements, by_rows.scale)),
            *((x, x) if by_columns is None else (by_columns.elements, by_columns.scale)),
            amax,
            amax if observed is None else observed,
            T,
            padded_T,
            source.eps,
        )
        tensors = (tensor for tensor in arguments[:9] if isinstance(tensor, torch.Tensor))
        specialized_on = tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)

        def run(tiling: _Tiling) -> None:
            at_once = max(1, tiling.warps // self._warps) * _multiprocessors(device)
            programs = min(-(-padded_T // tiling.rows), at_once)
            self._specialized[tiling].launch(programs, device, arguments, specialized_on)

        if self._tiling is None and x.numel() >= LARGE_ENOUGH:
            self._tiling = fastest(self._name, _TILINGS, run, device)
        run(self._tiling or _TILINGS[0])
        return Fp8Cast(by_rows, by_columns, None)

    def _operand(self, height: int, length: int, device: torch.device) -> ScaledOperand:
        return ScaledOperand.empty(height, length, self._dtype, "tensor", device, height)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
