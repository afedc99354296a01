"""Which implementation of an op runs: a fused Triton kernel where one applies, else the reference; the bits agree."""

from functools import lru_cache
from importlib.util import find_spec

import torch


@lru_cache(maxsize=1)
def have_triton() -> bool:
    """Whether Triton can be imported; it comes with torch's CUDA build."""
    return find_spec("triton") is not None


def has_mx_kernel(device: str, block: tuple[int, int] | None, scale_format: str) -> bool:
    """Whether ``kernels.quantize.triton`` knows such operands on a ``device`` ("cpu" or "cuda"): MX blocks of 32.

    Args:
        block: (rows, columns) that share a scale; None for rows and tensors.
    """
    return device == "cuda" and block == (1, 32) and scale_format == "e8m0" and have_triton()


def fuses_mx(matrix: torch.Tensor, block: tuple[int, int] | None, scale_format: str, transform_block: int) -> bool:
    """Whether the kernel takes this one: bf16 or fp32, contiguous in one dimension, whole groups along rows.

    Args:
        matrix: [R, K], the contracted dimension last; a transposed view counts as contiguous.
        transform_block: block of its Hadamard transform, 1 without one.
    """
    if not has_mx_kernel(matrix.device.type, block, scale_format):
        return False
    if matrix.dtype not in (torch.bfloat16, torch.float32) or matrix.numel() == 0:
        return False
    whole = matrix.shape[1] % max(32, transform_block) == 0
    return whole if matrix.stride(1) == 1 else matrix.stride(0) == 1  # along columns the kernel pads
