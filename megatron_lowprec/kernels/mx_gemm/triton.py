"""Block-scaled GEMM by Triton's ``dot_scaled``, with an fp32 epilogue: what torch's scaled product does not take.

On compute capabilities 10.0, 10.3 and 12.0 Triton compiles the tile below to block-scaled tensor-core instructions; a
test reads them in the PTX. Smaller tiles become bf16 products without a word, so the tile is fixed. Elsewhere
``dot_scaled`` multiplies bf16 values; it does not compile there for scales of 16 entries, which ``FOLDS`` multiplies
into bf16 values first.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.mx_gemm.operand import TILE_BLOCKS, MxOperand


class Tile(NamedTuple):
    """Rows and columns of a program's tile, terms of the contraction at once, warps, stages of the pipeline."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
TILE = Tile(128, 128, 128, 8, 3)


@triton.jit
def _scales(tiles_ptr, rows, first_block, across, limit, COUNT: tl.constexpr, TILE_BLOCKS: tl.constexpr):
    """uint8 [rows, COUNT] of the blocks from ``first_block`` on, from tiles; 0 outside."""
    block = first_block + tl.arange(0, COUNT)
    of_rows = (rows // 128).to(tl.int64) * across * 512 + (rows % 32) * 16 + rows % 128 // 32 * 4
    of_blocks = block // TILE_BLOCKS * 512 + block % TILE_BLOCKS
    inside = (rows < limit)[:, None] & (block < across * TILE_BLOCKS)[None, :]
    return tl.load(tiles_ptr + of_rows[:, None] + of_blocks[None, :], mask=inside, other=0)


@triton.jit
def _e2m1(codes):
    """fp32 values of 4-bit codes."""
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).to(tl.float32)
    normal = (1.0 + 0.5 * mantissa) * (1 << exponent).to(tl.float32) * 0.5
    value = tl.where(exponent == 0, 0.5 * mantissa, normal)
    return tl.where(codes & 8 != 0, -value, value)


@triton.jit
def _folded(codes, scales, FORMAT: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """[R, K] codes times their scales; exact in bf16's range."""
    R: tl.constexpr = scales.shape[0]
    COUNT: tl.constexpr = scales.shape[1]
    if FORMAT == "e2m1":
        wide = codes.to(tl.int32)
        elements = tl.join(_e2m1(wide & 15), _e2m1(wide >> 4))
    elif FORMAT == "e4m3":
        elements = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        elements = codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    if BLOCK == 16:
        decoded = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        byte = scales.to(tl.int32)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)
        decoded = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    out = tl.reshape(elements, [R, COUNT, BLOCK]) * decoded[:, :, None]
    return tl.reshape(out, [R, COUNT * BLOCK]).to(DTYPE)


@triton.jit
def _mx_gemm_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    a_tensor_scale_ptr,
    b_tensor_scale_ptr,
    out_ptr,
    M,
    N,
    a_pitch,
    b_pitch,
    across,
    alpha,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    TENSOR_SCALES: tl.constexpr,
    ADDS: tl.constexpr,
    FOLDS: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Pitches are the bytes of a row of codes, ``across`` the tiles of scales along K.

    TENSOR_SCALES: bit set, 1 for a's and 2 for b's. ADDS: to ``out``, which is fp32. FOLDS: decode to DTYPE before the
    product.
    """
    A_BYTES: tl.constexpr = BK // 2 if A_FORMAT == "e2m1" else BK
    B_BYTES: tl.constexpr = BK // 2 if B_FORMAT == "e2m1" else BK
    tiles_n = tl.cdiv(N, BN)
    m = tl.program_id(0) // tiles_n * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles_n * BN + tl.arange(0, BN)
    a_byte, b_byte = tl.arange(0, A_BYTES), tl.arange(0, B_BYTES)
    a_rows = a_ptr + m.to(tl.int64)[:, None] * a_pitch
    b_rows = b_ptr + n.to(tl.int64)[:, None] * b_pitch
    total = tl.zeros([BM, BN], tl.float32)
    for step in range(tl.cdiv(a_pitch, A_BYTES)):
        at_a, at_b = step * A_BYTES + a_byte, step * B_BYTES + b_byte
        a = tl.load(a_rows + at_a[None, :], mask=(m < M)[:, None] & (at_a < a_pitch)[None, :], other=0)
        b = tl.load(b_rows + at_b[None, :], mask=(n < N)[:, None] & (at_b < b_pitch)[None, :], other=0)
        a_scales = _scales(a_scales_ptr, m, step * (BK // BLOCK), across, M, BK // BLOCK, TILE_BLOCKS)
        b_scales = _scales(b_scales_ptr, n, step * (BK // BLOCK), across, N, BK // BLOCK, TILE_BLOCKS)
        if FOLDS:
            a = _folded(a, a_scales, A_FORMAT, BLOCK, DTYPE)
            b = _folded(b, b_scales, B_FORMAT, BLOCK, DTYPE)
            total = tl.dot(a, tl.trans(b), total)
        else:
            if A_FORMAT == "e4m3":
                a = a.to(tl.float8e4nv, bitcast=True)
            elif A_FORMAT == "e5m2":
                a = a.to(tl.float8e5, bitcast=True)
            if B_FORMAT == "e4m3":
                b = b.to(tl.float8e4nv, bitcast=True)
            elif B_FORMAT == "e5m2":
                b = b.to(tl.float8e5, bitcast=True)
            if BLOCK == 16:
                a_scales = a_scales.to(tl.float8e4nv, bitcast=True)
                b_scales = b_scales.to(tl.float8e4nv, bitcast=True)
            total = tl.dot_scaled(a, a_scales, A_FORMAT, tl.trans(b), b_scales, B_FORMAT, total)
    factor = tl.full([], alpha, tl.float32)
    if TENSOR_SCALES & 1:
        factor *= tl.load(a_tensor_scale_ptr)
    if TENSOR_SCALES & 2:
        factor *= tl.load(b_tensor_scale_ptr)
    total *= factor
    at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    if ADDS:
        total += tl.load(at, mask=mask, other=0.0)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


def mx_gemm(
    a: MxOperand,
    b: MxOperand,
    *,
    alpha: float = 1.0,
    compute_dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype,
    accumulate_into: torch.Tensor | None = None,
    overwrite: bool = False,
    folds: bool = False,
) -> torch.Tensor:
    """As the reference, in the order of the tile.

    Args:
        compute_dtype: only of ``folds``; else tensor cores take codes.
        folds: multiply scales into the values before the product: on GPUs without block-scaled instructions.
    """
    a, b = a.checked(), b.checked()
    M, N = a.codes.shape[0], b.codes.shape[0]
    out = a.codes.new_empty((M, N), dtype=out_dtype) if accumulate_into is None else accumulate_into
    of_tensors = (a.tensor_scale, b.tensor_scale)
    arguments = (
        *(operand.codes.view(torch.uint8) for operand in (a, b)),
        *(operand.scales for operand in (a, b)),
        *(out if scale is None else scale for scale in of_tensors),  # a placeholder is not read
        out,
        M,
        N,
        a.codes.shape[1],
        b.codes.shape[1],
        -(-a.columns // (TILE_BLOCKS * a.block)),
        alpha,
    )
    constants = constants_of(
        a.format,
        b.format,
        a.block,
        tensor_scales=sum(1 << i for i, scale in enumerate(of_tensors) if scale is not None),
        adds=accumulate_into is not None and not overwrite,
        folds=folds,
        compute_dtype=compute_dtype,
    )
    _mx_gemm_kernel[(-(-M // TILE.BM) * -(-N // TILE.BN),)](*arguments, **constants, **OPTIONS)
    return out


# Triton's default for fused multiply-adds is to change; here there is one to fuse, the addition to ``out``
OPTIONS: dict[str, Any] = {"num_warps": TILE.warps, "num_stages": TILE.stages, "enable_fp_fusion": False}


@lru_cache(maxsize=64)
def constants_of(
    a_format: str,
    b_format: str,
    block: int,
    *,
    tensor_scales: int = 0,
    adds: bool = False,
    folds: bool = False,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """The kernel's constexpr arguments."""
    return {
        "A_FORMAT": a_format,
        "B_FORMAT": b_format,
        "BLOCK": block,
        "TENSOR_SCALES": tensor_scales,
        "ADDS": adds,
        "FOLDS": folds,
        "DTYPE": _DTYPES[compute_dtype],
        "TILE_BLOCKS": TILE_BLOCKS,
        "BM": TILE.BM,
        "BN": TILE.BN,
        "BK": TILE.BK,
    }
