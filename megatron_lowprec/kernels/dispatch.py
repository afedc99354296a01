"""Which implementation of an op runs: a fused Triton kernel where one applies, else the reference; the bits agree."""

from functools import lru_cache
from importlib.util import find_spec

import torch


@lru_cache(maxsize=1)
def have_triton() -> bool:
    """Whether Triton can be imported; it comes with torch's CUDA build."""
    return find_spec("triton") is not None


def fuses_mx(matrix: torch.Tensor, block: tuple[int, int] | None, scale_format: str, transform_block: int) -> bool:
    """Whether ``kernels.quantize.triton`` takes an operand: MX blocks of 32, on a GPU, contiguous in one dimension.

    Args:
        matrix: [R, K], the contracted dimension last; a transposed view counts as contiguous.
        block: (rows, columns) that share a scale.
        transform_block: block of its Hadamard transform, 1 without one.
    """
    if not matrix.is_cuda or block != (1, 32) or scale_format != "e8m0" or matrix.numel() == 0:
        return False
    if matrix.dtype not in (torch.bfloat16, torch.float32) or not have_triton():
        return False
    # along rows a program's groups must be whole; along columns the kernel pads
    whole = matrix.shape[1] % max(32, transform_block) == 0
    return whole if matrix.stride(1) == 1 else matrix.stride(0) == 1
