"""Casts of the overhead experiment: bf16 -> FP8 E4M3 with one given scale, with and without a Hadamard transform.

Both read the operand once and write it once. The transform is the package's, ``triton_ops.hadamard``.
"""

import torch
import triton
import triton.language as tl

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8.rule import code_constants
from megatron_lowprec.kernels.cast_fp8.triton_ops import to_fp8
from megatron_lowprec.kernels.quantize.triton_ops import hadamard as group_hadamard

E4M3_MAX = FORMATS["e4m3"].max
# (entries or groups per program, warps); the benchmark takes the fastest of each kind.
CAST_TILES = ((2048, 4), (4096, 4), (8192, 8), (16384, 8))
HADAMARD_TILES = ((32, 1), (64, 2), (128, 4), (64, 1), (128, 2))


@triton.jit
def _cast_kernel(x_ptr, out_ptr, scale_ptr, entries, CODES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < entries
    scale = tl.load(scale_ptr)
    v = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    v = tl.minimum(tl.maximum(v, -CODES.MAX), CODES.MAX)
    tl.store(out_ptr + offsets, to_fp8(v, CODES), mask=mask)


@triton.jit
def _hadamard_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    signs_ptr,
    scale_ptr,
    groups,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (group < groups)[:, None]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    signs = tl.load(signs_ptr + tl.arange(0, GROUP))
    y = group_hadamard(tl.trans(x).to(tl.float32), signs[:, None], GROUP)
    v = y * tl.load(scale_ptr)
    v = tl.minimum(tl.maximum(v, -CODES.MAX), CODES.MAX)
    # As bytes, so that the transpose moves a quarter of fp32's size through shared memory.
    tl.store(out_ptr + offsets, tl.trans(to_fp8(v, CODES)), mask=mask)


def cast(x: torch.Tensor, scale: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """x [R, K] bf16, contiguous, times scale (fp32 [1]) -> float8_e4m3fn [R, K], saturating; ``tile`` of CAST_TILES."""
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    block, warps = tile
    _cast_kernel[(triton.cdiv(x.numel(), block),)](
        x, out, scale, x.numel(), CODES=code_constants(FORMATS["e4m3"], x.device), BLOCK=block, num_warps=warps
    )
    return out.view(torch.float8_e4m3fn)


def hadamard_cast(x: torch.Tensor, scale: torch.Tensor, signs: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """As ``cast`` after a Hadamard transform of groups along K; signs fp32 [g] of +-1/sqrt(g); K a multiple of g."""
    size, (at_once, warps) = signs.numel(), tile
    if x.shape[-1] % size or not x.is_contiguous():
        raise ValueError(f"the transform needs contiguous rows of a multiple of {size}, got {tuple(x.shape)}")
    groups, out = x.numel() // size, torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    constants = {"CODES": code_constants(FORMATS["e4m3"], x.device), "GROUP": size, "P": at_once}
    launch = _hadamard_kernel[(triton.cdiv(groups, at_once),)]
    launch(x, out, signs, scale, groups, **constants, num_warps=warps)
    return out.view(torch.float8_e4m3fn)
