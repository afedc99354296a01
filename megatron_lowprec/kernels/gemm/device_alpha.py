"""cuBLAS's GEMM with an alpha in GPU memory, which torch's products do not take; it costs no byte and no launch."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

_TRANSPOSED, _AS_STORED = 1, 0  # cublasOperation_t
_DATA_TYPES = {torch.float32: 0, torch.bfloat16: 14}  # cudaDataType_t
_PRODUCTS = {
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float32, torch.float32, torch.float32),
}
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_HOST, _DEVICE = 0, 1  # cublasPointerMode_t


def takes(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether ``product_`` multiplies a [M, K] and b [N, K] into ``out_dtype``: on a GPU, if the product ``fits``."""
    return a.is_cuda and fits(a, b, out_dtype) and _cublas() is not None


def fits(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether cuBLAS has the dtypes and the strides, and torch's setting asks no other sums than its default.

    Both operands are bf16, or both and the result fp32. One dimension is contiguous; rows and columns do not overlap.
    """
    if a.numel() == 0 or b.numel() == 0 or (a.dtype, b.dtype, out_dtype) not in _PRODUCTS:
        return False
    if a.dtype == torch.bfloat16 and not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction:
        return False
    return bool(_layout(a.shape, a.stride(), _AS_STORED)[1] and _layout(b.shape, b.stride(), _AS_STORED)[1])


def product_(a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor, out: torch.Tensor, *, add: bool) -> torch.Tensor:
    """``out = alpha * a @ b.T``, with ``+ out`` if ``add``, summed in fp32 and rounded once; returns ``out``.

    Args:
        a: [M, K]; b: [N, K], of its dtype.
        alpha: fp32 of one entry on the operands' device.
        out: [M, N], contiguous.

    Raises:
        RuntimeError: cuBLAS refuses the product.
    """
    library, handle = _cublas(), torch.cuda.current_blas_handle()
    assert library is not None
    # cuBLAS's matrices are stored by columns: it computes out.T = b @ a.T
    b_op, b_pitch = _layout(b.shape, b.stride(), _TRANSPOSED)
    a_op, a_pitch = _layout(a.shape, a.stride(), _AS_STORED)
    beta = _betas(out.device).data_ptr() + 4 * add
    of_data, of_out = _DATA_TYPES[a.dtype], _DATA_TYPES[out.dtype]
    status = library.cublasSetPointerMode_v2(handle, _DEVICE)
    status = status or library.cublasGemmEx(
        *(handle, b_op, a_op, b.shape[0], a.shape[0], a.shape[1], alpha.data_ptr()),
        *(b.data_ptr(), of_data, b_pitch, a.data_ptr(), of_data, a_pitch),
        *(beta, out.data_ptr(), of_out, out.shape[1], _COMPUTE_32F, _DEFAULT_ALGORITHM),
    )
    status = library.cublasSetPointerMode_v2(handle, _HOST) or status  # torch's own products pass host pointers
    if status:
        raise RuntimeError(f"cuBLAS refused a product of {tuple(a.shape)} and {tuple(b.shape)}: status {status}")
    return out


@lru_cache(maxsize=4096)
def _layout(shape: tuple[int, int], strides: tuple[int, int], by_rows: int) -> tuple[int, int]:
    """Operation and pitch of a matrix, 0 without one; ``by_rows``: operation on one whose rows are contiguous."""
    for inner, operation in ((1, by_rows), (0, 1 - by_rows)):
        size, pitch = shape[inner], strides[1 - inner]
        if strides[inner] == 1 and (pitch >= size or shape[1 - inner] == 1):
            return operation, max(pitch, size)
    return by_rows, 0


@lru_cache(maxsize=16)
def _betas(device: torch.device) -> torch.Tensor:
    """fp32 [2]: 0 and 1."""
    return torch.tensor([0.0, 1.0], device=device)


@lru_cache(maxsize=1)
def _cublas() -> Any:
    """The library that torch has loaded; None for a build of torch without it."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '0').split('.')[0]}")
    except OSError:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    operand: list[Any] = [pointer, integer, integer]
    library.cublasSetPointerMode_v2.argtypes = [pointer, integer]
    sizes: list[Any] = [integer] * 5
    library.cublasGemmEx.argtypes = [pointer, *sizes, pointer, *operand, *operand, pointer, *operand, integer, integer]
    return library
