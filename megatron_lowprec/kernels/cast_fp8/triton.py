"""Rowwise and columnwise FP8 data of a matrix from one read, and its amax; bits equal to ``reference.py``.

The codes are those of ``kernels.quantize.reference.quantize_operand``. A matrix [M, N] gives rowwise codes [M, N] and
columnwise codes [N, M padded]. Both have the contracted dimension last, as Hopper's FP8 GEMMs require. Reading bf16
and writing both moves 4 bytes an entry. A ``CastPrologue`` computes the matrix in the kernel, so the output of a norm
or an activation is never in memory.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.bias_grad.triton import sum_launch, sum_partials
from megatron_lowprec.kernels.cast_fp8.prologue import (
    KINDS,
    CastPrologue,
    Kind,
    Matrix,
    prologue_of,
)
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Cast, Fp8Rule, Layouts
from megatron_lowprec.kernels.cast_fp8.tiles import cast_tile
from megatron_lowprec.kernels.cast_fp8.triton_amax import amax_of, source_of_vector_amaxes, vector_amaxes_launch
from megatron_lowprec.kernels.launch import EMPTY, MOST_LAYOUTS, Specialized
from megatron_lowprec.kernels.planned_launch import Launch, Plan, fields, named, with_warps
from megatron_lowprec.kernels.tuning import LARGE_ENOUGH, Tuned, tunes

_BLOCK = 128


@triton.jit(do_not_specialize=["threshold", "M", "height"])
def _cast_kernel(
    x_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
    threshold,
    keep_scale,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    observed_ptr,
    sums_ptr,
    M,
    height,
    padded_M,
    N,
    stride,
    CAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    source = (x_ptr, second_ptr, third_ptr, fourth_ptr, threshold, keep_scale)
    tiles_n = tl.cdiv(N, BN)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    cast_tile(
        source, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, observed_ptr, sums_ptr,
        tile_m, tile_n, M, height, padded_M, N, stride, CAST, BM, BN, ROWS, COLUMNS
    )  # fmt: skip


@triton.jit
def _planned_cast_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    amax_ptr,
    sums_ptr,
    M,
    height,
    padded_M,
    N,
    stride,
    CAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``_cast_kernel`` of a matrix in memory whose amax is not observed, for generated code; ``CAST`` of ``fields``."""
    _cast_kernel(
        x_ptr, x_ptr, x_ptr, x_ptr, 0, 1.0, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, x_ptr, sums_ptr,
        M, height, padded_M, N, stride, named(CAST), BM, BN, ROWS, COLUMNS
    )  # fmt: skip


def cast_fp8(
    x: torch.Tensor | CastPrologue,
    rule: Fp8Rule,
    *,
    rowwise: bool,
    columnwise: bool,
    amax: torch.Tensor | None = None,
    observed: torch.Tensor | None = None,
    sums: bool = False,
) -> Fp8Cast:
    """Rowwise data, columnwise data or both of x [M, N] in FP8, from one read.

    Args:
        x: bf16 or fp32, last dimension contiguous, not empty. N a multiple of 16; of 128 for rowwise 1x128 blocks and
            for 128x128 blocks. Any M: columns are zero-padded to the GEMM's multiple.
        amax: fp32 [1] for granularity "tensor", [M + N] for "row", from ``amax_of`` or a history; None computes it.
        observed: fp32 [1], raised to the amax of x, NaN as Inf.
        sums: also sum over M, for the gradient of a bias; for a computed source before rounding its entries.
    """
    first = x if isinstance(x, torch.Tensor) else x.x
    if amax is None and rule.granularity in ("tensor", "row"):
        amax = amax_of(x, vectors=rule.granularity == "row")
    device = first.device
    key: tuple[Any, ...] = ()
    if isinstance(x, torch.Tensor):
        key = (*x.shape, x.stride(0), x.get_device(), rowwise, columnwise, observed is not None, sums)
    known = rule.prepared.get(key)
    if known is None:
        known = _prepare(prologue_of(x), rule, rowwise, columnwise, observed is not None, sums)
    specialized, programs, layouts, empty, partial_rows, sizes, specialized_sizes = known
    made = [
        None if each is None else each.empty(device) if each.padded else empty(each.size, each.stride, each.dtype)
        for each in layouts
    ]
    partials = None
    if sums:
        partials = torch.empty((1, partial_rows, sizes[3]), dtype=torch.float32, device=device)
    if isinstance(x, torch.Tensor):
        source: tuple[Any, ...] = (x, x, x, x, 0, 1.0)
        specialized_on = (*specialized_sizes, x.dtype, x.data_ptr() % 16 == 0)
    else:
        source, specialized_on = x.arguments(), (*specialized_sizes, *x.specialized_on())
    # placeholders for absent tensors, which the kernel does not access
    arguments = (
        *source,
        *(made if rowwise and columnwise else [first if tensor is None else tensor for tensor in made]),
        first if amax is None else amax,
        first if observed is None else observed,
        first if partials is None else partials,
        *sizes,
    )
    if specialized is None:  # tilings are to be measured
        kernel, (M, _, padded_M, N, _) = rule.kernels[programs], sizes

        def launch(tiling: Tiling) -> None:
            specialized, programs = kernel.at(tiling, M, padded_M, N)
            specialized.launch(programs, device, arguments, specialized_on)

        tiling = kernel.tuned.choose(M * N, launch, device, below=(M * N).bit_length())
        specialized, programs = kernel.at(tiling, M, padded_M, N)
    elif key:
        rule.prepared[key] = known
    specialized.launch(programs, device, arguments, specialized_on)
    return Fp8Cast._make((*made, None if partials is None else sum_partials(partials, first.dtype)[0]))


class _Prepared(NamedTuple):
    """What a cast of matrices of one size has in common.

    Attributes:
        specialized, programs: the kernel for the tiling; None until that is known, and the key in ``rule.kernels``.
        layouts: of the tensors.
        empty: a tensor by size, stride and dtype on the matrix's device, the current one.
        partial_rows: of partial sums.
        sizes: M, height, padded M, N and the row stride, the kernel's last arguments.
        specialized_on: properties of the sizes on which Triton specializes the kernel.
    """

    specialized: Specialized | None
    programs: Any
    layouts: Layouts
    empty: Callable[..., torch.Tensor]
    partial_rows: int
    sizes: tuple[int, int, int, int, int]
    specialized_on: tuple[bool, ...]


def _prepare(
    source: CastPrologue, rule: Fp8Rule, rowwise: bool, columnwise: bool, observes: bool, sums: bool
) -> _Prepared:
    key = (rowwise, columnwise, observes, sums, source.kind, source.head_widths)
    kernel = rule.kernels.get(key)
    if kernel is None:
        kernel = rule.kernels[key] = _CastKernel(rule, source.x.device, *key)
    if len(rule.prepared) >= MOST_LAYOUTS:
        rule.prepared.clear()
    (M, N), stride = source.shape, source.x.stride(0)
    height, padded_M = rule.padded_rows(M)
    first = kernel.tilings[0]
    tiling = first if sums else kernel.tuned.known(M * N, below=(M * N).bit_length())
    specialized, programs = (None, key) if tiling is None else kernel.at(tiling, M, padded_M, N)
    return _Prepared(
        specialized,
        programs,
        rule.layouts(source.shape, rowwise=rowwise, columnwise=columnwise),
        EMPTY[source.x.device.type],
        -(-padded_M // first.rows),
        (M, height, padded_M, N, stride),
        (N % 16 == 0, stride % 16 == 0, N == 1, stride == 1, padded_M == 1),
    )


def plan(
    x: torch.Tensor, rule: Fp8Rule, ways: tuple[bool, bool, bool], rows: int, known: Callable[[Any], bool]
) -> Plan:
    """The launches of ``cast_fp8`` for a compiler; tensors are "x", "amax", those of ``Fp8Cast`` and of the plan.

    Args:
        x: without data; a matrix as ``cast_fp8`` takes, whose rows may be symbolic.
        ways: its ``rowwise``, ``columnwise`` and ``sums``.
        rows: a number of rows to choose a tiling for.
        known: whether a comparison of sizes is true for all numbers of rows.
    """
    (M, N), device, (rowwise, columnwise, sums) = x.shape, x.device, ways
    height, padded_M = rule.padded_rows(M)
    launches, zeros, empty = list[Launch](), dict[str, tuple[Any, ...]](), dict[str, tuple[Any, ...]]()
    for name, layout in zip(Fp8Cast._fields[:4], rule.layouts(x.shape, rowwise=rowwise, columnwise=columnwise)):
        if layout is not None and layout.padded:
            zeros[name] = layout.size
    key = (rowwise, columnwise, False, sums, Matrix.kind, Matrix.head_widths)
    kernel = rule.kernels.setdefault(key, _CastKernel(rule, device, *key))
    tiling = kernel.tilings[0]
    if sums:
        empty["partials"] = (1, -(-padded_M // tiling.rows), N)
    elif rows * N >= LARGE_ENOUGH and tunes(device):
        zeros_like_x = torch.zeros(rows, N, dtype=x.dtype, device=device)
        cast_fp8(zeros_like_x, rule, rowwise=rowwise, columnwise=columnwise)  # measures tilings that are not known
        tiling = kernel.tuned.choose(rows * N, lambda _: None, device, below=(rows * N).bit_length())
    if rule.granularity == "row":
        zeros["amax"] = (M + N,)
        launches.append(vector_amaxes_launch(x))
    whole = known(padded_M == M) and known(M % tiling.rows == 0) and N % tiling.columns == 0
    constants = kernel.constants(tiling, whole)
    programs = -(-padded_M // tiling.rows) * -(-N // tiling.columns)
    names = {
        "row_ptr": "rowwise_data" if rowwise else "x",
        "row_scale_ptr": "rowwise_scale" if rowwise else "x",
        "col_ptr": "columnwise_data" if columnwise else "x",
        "col_scale_ptr": "columnwise_scale" if columnwise else "x",
        "amax_ptr": "amax" if rule.granularity in ("tensor", "row") else "x",
        "sums_ptr": "partials" if sums else "x",
    }
    sizes = {"M": M, "height": height, "padded_M": padded_M, "N": N, "stride": x.stride(0)}
    arguments = {"x_ptr": "x", **names, **sizes, **constants, "CAST": fields(constants["CAST"])}
    launches.append(Launch(with_warps(_planned_cast_kernel, tiling.warps), (programs, 1, 1), arguments))
    if sums:
        launches.append(sum_launch("partials", empty["partials"][1], N, "sums"))
    return Plan(launches, zeros, empty)


@cache
def source_of_plans() -> str:
    """Digest of the kernels of ``plan``; compiled code on disk holds their sources."""
    keys = _planned_cast_kernel.cache_key + source_of_vector_amaxes()
    return hashlib.blake2b(keys.encode(), digest_size=8).hexdigest()


class Tiling(NamedTuple):
    """Rows and columns of a program's tile, and its warps.

    Attributes:
        part_rows: rows at a time if each has its own scale; 0 for all.
        part_columns: columns at a time if each has its own scale, or the matrix has one; 0 for all.
    """

    rows: int
    columns: int
    warps: int
    part_rows: int = 0
    part_columns: int = 0

    def constants(self) -> dict[str, int]:
        """The constexpr parameters of a kernel with ``cast_tile``."""
        return {
            "BM": self.rows,
            "BN": self.columns,
            "ROWS": self.part_rows or self.rows,
            "COLUMNS": self.part_columns or self.columns,
        }


def tilings_of(granularity: str, rows: bool, columns: bool) -> tuple[Tiling, ...]:
    """Candidates for a cast that writes rowwise data, columnwise data or both; rows divide a block's 128."""
    B = _BLOCK
    if granularity == "1x128":
        shapes: tuple[tuple[int, ...], ...] = {
            (True, True): ((B, B, 2, 32, 32), (B, B, 4, 64, 64), (B, B, 4, 64, 32), (B, B, 8, 64, 64)),
            (True, False): ((64, B, 4), (32, B, 4), (B, B, 8)),
            (False, True): ((B, 64, 4), (B, 32, 4), (B, 64, 8)),
        }[rows, columns]
    elif granularity == "128x128":
        shapes = ((B, B, 8), (B, B, 4))
    else:
        shapes = ((64, 64, 4), (64, 128, 4), (128, 64, 8), (64, 128, 8), (128, 128, 8))
        if granularity == "tensor":
            # Sequential parts share the scale and one reduction of the observed amax: half the instructions of a
            # cast from memory. Too few programs for a small matrix.
            shapes += ((64, 256, 4, 0, 128), (64, 512, 4, 0, 128), (128, 256, 8, 0, 128))
    return tuple(Tiling(*shape) for shape in shapes)


class _CastKernel:
    """The kernel for one rule and set of outputs; ``tuned`` selects a tiling for each power of two of sizes.

    Sums always use the first tiling: the tiling fixes their order and so their last bits, and tensor-parallel ranks
    with copies of a bias must update it equally.
    """

    def __init__(
        self,
        rule: Fp8Rule,
        device: torch.device,
        rows: bool,
        columns: bool,
        observes: bool,
        sums: bool,
        kind: Kind,
        widths: tuple[int, int] = (0, 0),
    ) -> None:
        self._parts = 2 if kind == "swiglu_grad" else 1  # the gate's columns and those of ``up`` share no tile
        self._constants = rule.constants(rows, columns, observes, sums, KINDS[kind], widths, device)
        self.tilings = tilings_of(rule.granularity, rows, columns)
        self.tuned = Tuned(f"{_cast_kernel.__name__} {self._constants._asdict()}", self.tilings)
        self._specialized: dict[tuple[Tiling, bool], Specialized] = {}

    def at(self, tiling: Tiling, M: int, padded_M: int, N: int) -> tuple[Specialized, int]:
        """The kernel specialized for a tiling, and the number of programs that cover [M, N]."""
        programs = -(-padded_M // tiling.rows) * -(-N // tiling.columns)
        whole = padded_M == M and M % tiling.rows == 0 and N % (tiling.columns * self._parts) == 0
        return self._specialized.get((tiling, whole)) or self._specialize(tiling, whole), programs

    def constants(self, tiling: Tiling, whole: bool) -> dict[str, Any]:
        """The constexpr parameters; ``whole`` as ``CastConstants.WHOLE``."""
        return {"CAST": self._constants._replace(WHOLE=whole), **tiling.constants()}

    def _specialize(self, tiling: Tiling, whole: bool) -> Specialized:
        kernel = Specialized(
            _cast_kernel,
            self.constants(tiling, whole),
            num_warps=tiling.warps,
            # a contracted multiply-add rounds once, the reference twice
            enable_fp_fusion=False,
        )
        self._specialized[tiling, whole] = kernel
        return kernel
