"""``reference.add_product_`` by cuBLASLt with beta = 1, since torch's scaled products cannot add to their output.

A weight gradient of [O, I] then reads and writes ``main_grad`` once, 8 bytes an entry, where product and sum move 16.
The sum rounds once where the reference rounds twice, and cuBLASLt's algorithm may accumulate the product otherwise than
that of torch's product. ``enable`` switches it on for the process.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

_DATA_TYPES = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}  # cudaDataType_t
_COMPUTE_32F, _TRANSPOSED = 68, 1
# cublasLtMatmulDescAttributes_t; an operation that is not set is none
_OPERATION_A, _SCALE_A, _SCALE_B, _FAST_ACCUMULATION = 3, 17, 18, 25
# cublasLtMatmulPreferenceAttributes_t: alignments of A, B, C and D in bytes
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
_WORKSPACE, _LARGEST_ALIGNMENT = 32 * 2**20, 256

_enabled = False


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Problem(NamedTuple):
    """What a plan depends on; ``alignments`` are those of a, b and out."""

    device: torch.device
    rows: int
    columns: int
    contracted: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    fast_accumulation: bool
    alignments: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Plan:
    """Descriptors of a product, destroyed with the plan, and the algorithm that cuBLASLt chose."""

    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    found: _Heuristic


def enable(on: bool) -> None:
    """Let ``takes`` answer for this process; RuntimeError for a build of torch without cuBLASLt."""
    global _enabled
    if on and library() is None:
        raise RuntimeError(
            "FP8 products that add to main_grad need cuBLASLt, which torch's CUDA builds bring; this torch "
            f"{torch.__version__} has none: leave the option out"
        )
    _enabled = on


def takes(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, a_granularity: str, b_granularity: str) -> bool:
    """Whether ``add_product_`` is enabled and computes this product: on a GPU, with one scale a tensor."""
    if not (_enabled and a.is_cuda and a_granularity == b_granularity == "tensor"):
        return False
    return fits(a, b, out)


def fits(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether cuBLASLt has such a product: rows and addresses in 16 bytes, not E5M2 times E5M2, an fp32 sum."""
    whole = a.shape[1] % 16 == 0 and out.shape[1] % 16 == 0
    whole = whole and all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (a, b, out))
    return whole and torch.float8_e4m3fn in (a.dtype, b.dtype) and out.dtype == torch.float32


def add_product_(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """As the reference; a product that ``fits``.

    Raises:
        RuntimeError: cuBLASLt has no algorithm for the product, or fails.
    """
    lt, operands = library(), (a, b, out)
    assert lt is not None
    alignments = tuple(_alignment(each.data_ptr()) for each in operands)
    sizes = a.shape[0], b.shape[0], a.shape[1]
    problem = Problem(a.device, *sizes, a.dtype, b.dtype, fast_accumulation, alignments)  # type: ignore[arg-type]
    plan = find_plan(problem)
    for attribute, scale in ((_SCALE_A, b_scale), (_SCALE_B, a_scale)):  # cuBLASLt's A is b
        _set(lt.cublasLtMatmulDescSetAttribute, plan.description, attribute, ctypes.c_void_p(scale.data_ptr()))
    one = ctypes.c_float(1.0)
    workspace = torch.empty(plan.found.workspace, dtype=torch.uint8, device=a.device)
    of_b, of_a, of_out = plan.layouts
    _check(
        lt.cublasLtMatmul(
            *(_handle(), plan.description, ctypes.byref(one), b.data_ptr(), of_b, a.data_ptr(), of_a),
            *(ctypes.byref(one), out.data_ptr(), of_out, out.data_ptr(), of_out),
            *(ctypes.byref(plan.found.algorithm), workspace.data_ptr(), plan.found.workspace, _stream(a.device)),
        ),
        problem,
    )
    return out


@lru_cache(maxsize=256)
def find_plan(problem: Problem) -> Plan:
    """The plan of a problem, whose scales are those of its last product.

    cuBLASLt's matrices are stored by columns: it computes out.T [N, M] = b.T, transposed, times a.T.
    """
    lt = library()
    assert lt is not None
    description, scale = ctypes.c_void_p(), torch.empty(1, device=problem.device)
    _check(lt.cublasLtMatmulDescCreate(ctypes.byref(description), _COMPUTE_32F, _DATA_TYPES[torch.float32]), problem)
    attributes = {
        _OPERATION_A: ctypes.c_int32(_TRANSPOSED),
        _SCALE_A: ctypes.c_void_p(scale.data_ptr()),  # not read in the search
        _SCALE_B: ctypes.c_void_p(scale.data_ptr()),
        _FAST_ACCUMULATION: ctypes.c_int8(problem.fast_accumulation),
    }
    for attribute, value in attributes.items():
        _set(lt.cublasLtMatmulDescSetAttribute, description, attribute, value)
    rows, columns, contracted = problem.rows, problem.columns, problem.contracted
    layouts = (
        _layout(lt, problem.b_dtype, contracted, columns),
        _layout(lt, problem.a_dtype, contracted, rows),
        _layout(lt, torch.float32, columns, rows),
    )
    preference = ctypes.c_void_p()
    _check(lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), problem)
    of_a, of_b, of_out = problem.alignments
    wanted = dict(zip(_ALIGNMENTS, (of_b, of_a, of_out, of_out), strict=True))
    for attribute, alignment in wanted.items():
        _set(lt.cublasLtMatmulPreferenceSetAttribute, preference, attribute, ctypes.c_uint32(alignment))
    _set(lt.cublasLtMatmulPreferenceSetAttribute, preference, _MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE))
    found, count = _Heuristic(), ctypes.c_int(0)
    of_b_layout, of_a_layout, of_out_layout = layouts
    status = lt.cublasLtMatmulAlgoGetHeuristic(
        *(_handle(), description, of_b_layout, of_a_layout, of_out_layout, of_out_layout, preference, 1),
        *(ctypes.byref(found), ctypes.byref(count)),
    )
    lt.cublasLtMatmulPreferenceDestroy(preference)
    _check(status or found.state or (0 if count.value else 15), problem)  # 15: CUBLAS_STATUS_NOT_SUPPORTED
    plan = Plan(description, layouts, found)
    weakref.finalize(plan, _destroy, lt, description, layouts).atexit = False
    return plan


def _destroy(lt: Any, description: ctypes.c_void_p, layouts: Iterable[ctypes.c_void_p]) -> None:
    lt.cublasLtMatmulDescDestroy(description)
    for layout in layouts:
        lt.cublasLtMatrixLayoutDestroy(layout)


def _layout(lt: Any, dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """A matrix stored by columns, without gaps."""
    layout = ctypes.c_void_p()
    status = lt.cublasLtMatrixLayoutCreate(ctypes.byref(layout), _DATA_TYPES[dtype], rows, columns, rows)
    if status:
        raise RuntimeError(f"cuBLASLt refused a matrix of {rows} x {columns}: status {status}")
    return layout


def _set(function: Any, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
    status = function(of, attribute, ctypes.byref(value), ctypes.sizeof(value))
    if status:
        raise RuntimeError(f"cuBLASLt refused attribute {attribute}: status {status}")


def _check(status: int, problem: Problem) -> None:
    if status:
        raise RuntimeError(
            f"cuBLASLt refused an FP8 product that adds, of {problem}: status {status}; give --no-fp8-accumulate-wgrad"
        )


def _alignment(address: int) -> int:
    """The largest power of two that divides an address, at most what cuBLASLt distinguishes."""
    return min(address & -address or _LARGEST_ALIGNMENT, _LARGEST_ALIGNMENT)


def _handle() -> int:
    """torch's handle of cuBLAS for the current device, which is one of cuBLASLt too."""
    return torch.cuda.current_blas_handle()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@lru_cache(maxsize=1)
def library() -> Any:
    """The cuBLASLt that torch has loaded; None for a build of torch without it."""
    try:
        return typed(ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}"))
    except OSError:
        return None


def typed(lt: Any) -> Any:
    """The library with the types of its functions' arguments."""
    pointer, integer, size, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
    lt.cublasLtMatmulDescCreate.argtypes = [pointer, integer, integer]
    lt.cublasLtMatmulDescSetAttribute.argtypes = [pointer, integer, pointer, size]
    lt.cublasLtMatmulDescDestroy.argtypes = [pointer]
    lt.cublasLtMatrixLayoutDestroy.argtypes = [pointer]
    lt.cublasLtMatrixLayoutCreate.argtypes = [pointer, integer, wide, wide, ctypes.c_int64]
    lt.cublasLtMatmulPreferenceCreate.argtypes = [pointer]
    lt.cublasLtMatmulPreferenceSetAttribute.argtypes = [pointer, integer, pointer, size]
    lt.cublasLtMatmulPreferenceDestroy.argtypes = [pointer]
    lt.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, integer, pointer, pointer]
    lt.cublasLtMatmul.argtypes = [*[pointer] * 14, size, pointer]
    return lt
