"""Triton functions of the FP8 casts: reading entries, scales, and conversion to codes."""

import torch
import triton
import triton.language as tl

from megatron_lowprec.kernels.cast_fp8.prologue import KINDS
from megatron_lowprec.kernels.cast_fp8.rule import GRANULARITY_NUMBERS
from megatron_lowprec.kernels.dropout.triton import factors
from megatron_lowprec.kernels.gelu.triton import gelu_of, gelu_slope_of
from megatron_lowprec.kernels.layernorm.triton import affine
from megatron_lowprec.kernels.quantize.triton_ops import NEAREST_EVEN, element_codes, round_to_grid
from megatron_lowprec.kernels.swiglu.triton import swiglu_of, swiglu_slopes_of

_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)

# named values of CAST.GRANULARITY and CAST.KIND
TENSOR = tl.constexpr(GRANULARITY_NUMBERS["tensor"])
ROW = tl.constexpr(GRANULARITY_NUMBERS["row"])
BLOCK_1X128 = tl.constexpr(GRANULARITY_NUMBERS["1x128"])
BLOCK_128X128 = tl.constexpr(GRANULARITY_NUMBERS["128x128"])
MATRIX = tl.constexpr(KINDS["matrix"])
BIAS_GELU = tl.constexpr(KINDS["bias_gelu"])
BIAS_GELU_GRAD = tl.constexpr(KINDS["bias_gelu_grad"])
DROPOUT_GRAD = tl.constexpr(KINDS["dropout_grad"])
LAYERNORM = tl.constexpr(KINDS["layernorm"])
RMSNORM = tl.constexpr(KINDS["rmsnorm"])
QKV_GRAD = tl.constexpr(KINDS["qkv_grad"])
SWIGLU = tl.constexpr(KINDS["swiglu"])
SWIGLU_GRAD = tl.constexpr(KINDS["swiglu_grad"])


@triton.jit
def places(rows, first_column, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Row and column indices of a tile [R, COLUMNS], or split into [COLUMNS / CHUNK, R, CHUNK]."""
    if CHUNK == COLUMNS:
        row = rows[:, None]
        col = (first_column + tl.arange(0, COLUMNS))[None, :]
    else:
        row = rows[None, :, None]
        chunk = first_column + CHUNK * tl.arange(0, COLUMNS // CHUNK)
        col = chunk[:, None, None] + tl.arange(0, CHUNK)[None, None, :]
    return row, col


@triton.jit
def below(index, end, CAST: tl.constexpr):
    """``index < end`` for row or column indices; constant true where tiles divide the matrix."""
    return tl.full(index.shape, True, tl.int1) if CAST.WHOLE else index < end


@triton.jit
def place_in_parts(q_ptr, k_ptr, v_ptr, row, col, stride, QUERY: tl.constexpr, HEAD: tl.constexpr):
    """Addresses of the entries of a matrix stored in three tensors. Each group of columns has QUERY of q, with row
    stride ``stride``, then HEAD of k and HEAD of v.
    """
    group, place = col // (QUERY + 2 * HEAD), col % (QUERY + 2 * HEAD)
    row = row.to(tl.int64)
    q = q_ptr + row * stride + (group * QUERY + place)
    at = row * (stride // QUERY * HEAD) + (group * HEAD + place - QUERY)
    return tl.where(place < QUERY, q, tl.where(place < QUERY + HEAD, k_ptr + at, v_ptr + (at - HEAD)))


@triton.jit
def of_rows(values_ptr, rows, M, PLAIN: tl.constexpr, CAST: tl.constexpr):
    """One value a row, in the layout of ``places``; a vector load, since threads would load a column eight times."""
    values = tl.load(values_ptr + rows, mask=below(rows, M, CAST), other=0.0)
    return values[:, None] if PLAIN else values[None, :, None]


@triton.jit
def read(source, rows, first_column, M, N, stride, CAST: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """fp32 entries, unrounded, at ``rows`` [R] and COLUMNS columns from ``first_column``; zeros outside [M, N].

    ``source`` holds the kernel arguments of a ``CastPrologue``; ``first_column`` is a multiple of 8. The result has the
    layout of ``places``.
    """
    x_ptr, second_ptr, third_ptr, fourth_ptr = source[0], source[1], source[2], source[3]
    KIND: tl.constexpr = CAST.KIND
    row, col = places(rows, first_column, COLUMNS, CHUNK)
    within = below(col, N, CAST)
    inside = below(row, M, CAST) & within
    at = row.to(tl.int64) * stride + col
    if KIND == QKV_GRAD:
        x_ptr, at = place_in_parts(x_ptr, second_ptr, third_ptr, row, col, stride, CAST.QUERY, CAST.HEAD), 0
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == BIAS_GELU or KIND == BIAS_GELU_GRAD:  # noqa: SIM109 - Triton has no `in`
        bias = tl.load(third_ptr + col, mask=within, other=0.0).to(tl.float32)
        if KIND == BIAS_GELU:
            x = gelu_of(x + bias)
        else:
            argument = tl.load(second_ptr + at, mask=inside, other=0.0).to(tl.float32)
            x = x * gelu_slope_of(argument + bias)
        x = tl.where(inside, x, 0.0)
    elif KIND == SWIGLU:
        x = swiglu_of(x, tl.load(second_ptr + at, mask=inside, other=0.0).to(tl.float32))
    elif KIND == SWIGLU_GRAD:
        # Each half reads the other: the gate's tile and that of ``up`` run at about the same time and share the cache.
        half = N // 2
        of_gate = first_column < half if CAST.WHOLE else col < half  # one value a tile keeps loads contiguous
        shift = tl.where(of_gate, 0, half)
        other = tl.load(x_ptr + (at + half - 2 * shift), mask=inside, other=0.0).to(tl.float32)
        dout_at = row.to(tl.int64) * (stride // 2) + (col - shift)
        dout = tl.load(second_ptr + dout_at, mask=inside, other=0.0).to(tl.float32)
        by_gate, by_up = swiglu_slopes_of(tl.where(of_gate, x, other), tl.where(of_gate, other, x))
        x = dout * tl.where(of_gate, by_gate, by_up)
    elif KIND == DROPOUT_GRAD:
        kept = factors(rows, first_column, fourth_ptr, source[4], source[5], COLUMNS)
        if CHUNK != COLUMNS:
            kept = tl.permute(tl.reshape(kept, [rows.shape[0], COLUMNS // CHUNK, CHUNK]), (1, 0, 2))
        x = x * kept
    elif KIND == LAYERNORM or KIND == RMSNORM:  # noqa: SIM109
        rstd = of_rows(fourth_ptr, rows, M, CHUNK == COLUMNS, CAST)
        weight = tl.load(second_ptr + col, mask=within, other=0.0).to(tl.float32)
        bias = weight
        if KIND == LAYERNORM:
            x = x - of_rows(fourth_ptr + M, rows, M, CHUNK == COLUMNS, CAST)
            bias = tl.load(third_ptr + col, mask=within, other=0.0).to(tl.float32)
        x = tl.where(inside, affine(x, rstd, weight, bias, KIND == LAYERNORM), 0.0)
    return x


@triton.jit
def as_stored(x, BF16: tl.constexpr, CAST: tl.constexpr):
    """fp32 entries of a computed matrix, rounded to the matrix's dtype as in memory."""
    if BF16 and CAST.KIND != MATRIX and CAST.KIND != QKV_GRAD:
        x = round_to_bf16(x, CAST.CODES.NATIVE)
    return x


@triton.jit
def round_to_bf16(x, NATIVE: tl.constexpr):
    """fp32 to the nearest bf16 number, ties to even; integer arithmetic in the interpreter, which would truncate."""
    if NATIVE:
        # converts in pairs, as the compiler does only for values that it stores
        x = tl.inline_asm_elementwise(
            """{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xFFFF0000; }""",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def encode_scale(amax, CAST: tl.constexpr):
    """fp32 encode scale of an amax, as ``reference.fp32_encode_scale``."""
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, CAST.SCALED_MAX, tl.float32), amax), _FP32_MAX)
    if CAST.FLOOR == 0.0:
        scale = tl.where(amax == 0.0, 1.0, scale)
    else:
        scale = tl.where(amax < CAST.FLOOR, CAST.FLOOR_SCALE, scale)
    bits = scale.to(tl.int32, bitcast=True)
    if CAST.POWER_OF_TWO:
        bits = bits & 0x7F800000
    bits = tl.maximum(bits, 0x00400000)  # 2^-127
    finite = (amax.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    return tl.where(finite, bits, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def both_scales(amax, CAST: tl.constexpr, OF_BF16: tl.constexpr):
    """``encode_scale`` and its reciprocal, the decode scale, both rounded to nearest.

    OF_BF16: amax is a bf16 number, on a GPU. No IEEE division is needed then. The quotient of 1.75 by one of 128
    mantissas is exactly rounded after one correction, and so is the scale's reciprocal, from amax / MAX;
    tests/kernels/test_cast.py tests all bf16 numbers.
    """
    if OF_BF16 and CAST.FLOOR == 0.0 and CAST.SCALED_MAX == CAST.CODES.MAX and not CAST.POWER_OF_TWO:
        # the least amax whose quotient is finite in fp32; a lower one gets fp32's maximum as scale, and 0 gets 1
        LEAST: tl.constexpr = (1.75 + 2.0**-23) * (CAST.CODES.MAX / 1.75) * 2.0**-128
        number = tl.maximum(tl.where(amax == 0.0, CAST.CODES.MAX, amax), LEAST)
        bits = number.to(tl.int32, bitcast=True)
        exponent = bits & 0x7F800000
        mantissa = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        about = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [mantissa], dtype=tl.float32, is_pure=True, pack=1
        )
        top = tl.full(amax.shape, 1.75, tl.float32)
        quotient = 1.75 * about
        quotient = tl.fma(tl.fma(-quotient, mantissa, top), about, quotient)
        MAX_EXPONENT: tl.constexpr = 8 if CAST.CODES.MAX == 448.0 else 15  # of 448 (E4M3), 57344 (E5M2)
        bits = quotient.to(tl.int32, bitcast=True) + ((127 + MAX_EXPONENT) << 23) - exponent
        scale = tl.where(amax < float("inf"), bits, 0x7FC00000).to(tl.float32, bitcast=True)
        about = number * (1.0 / CAST.CODES.MAX)
        decode = tl.fma(about, tl.fma(-about, scale, tl.full(amax.shape, 1.0, tl.float32)), about)
    else:
        scale = encode_scale(amax, CAST)
        decode = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return scale, decode


@triton.jit
def to_fp8(v, CODES: tl.constexpr):
    """fp32 -> uint8 codes, nearest even, saturating; ``CODES`` is a ``CodeConstants``."""
    if CODES.NATIVE:
        if CODES.MANTISSA == 3:
            codes = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        rounded = round_to_grid(v, 0, 0, CODES.MANTISSA, CODES.MIN_EXPONENT, CODES.MAX, NEAREST_EVEN, 16, True)
        codes = element_codes(rounded, CODES.MANTISSA, CODES.MIN_EXPONENT, 8, CODES.NAN_CODE, v != v).to(tl.uint8)
    return codes


@triton.jit
def from_fp8(codes, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """uint8 codes -> fp32, exact, NaN and Inf included.

    Exponent and mantissa, shifted to fp32's fields, give a number up to a power of two.
    """
    code = codes.to(tl.int32)
    POWER: tl.constexpr = 2.0 ** (126 + MIN_EXPONENT)
    bits = code & 0x7F
    magnitude = (bits << (23 - MANTISSA)).to(tl.float32, bitcast=True) * POWER
    LARGEST: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B  # E5M2 has Inf above
    magnitude = tl.where(bits > LARGEST, float("nan"), magnitude)
    if MANTISSA == 2:
        magnitude = tl.where(bits == 0x7C, float("inf"), magnitude)
    sign = (code & 0x80) << 24  # Triton negates by a subtraction from 0, which loses the sign of 0
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_to_fp8(v, CODES: tl.constexpr):
    """fp32 rounded to the format, saturating, as fp32.

    Natively the codes are not integers in between: of bytes extracted from a code that was just converted, ptxas 12.8
    and 12.9 (Triton 3.6 has 12.8) read some from the register before they write it.
    """
    if CODES.NATIVE:
        DTYPE: tl.constexpr = tl.float8e4nv if CODES.MANTISSA == 3 else tl.float8e5
        v = v.to(DTYPE).to(tl.float32)
    else:
        v = from_fp8(to_fp8(v, CODES), CODES.MANTISSA, CODES.MIN_EXPONENT)
    return v


@triton.jit
def four_to_fp8(v0, v1, v2, v3, CODES: tl.constexpr):
    """``to_fp8`` of four numbers as one uint32, v0's code lowest; natively two conversions of pairs."""
    if CODES.NATIVE:
        PAIR: tl.constexpr = "e4m3x2" if CODES.MANTISSA == 3 else "e5m2x2"
        word = tl.inline_asm_elementwise(
            f"""{{ .reg .b16 low, high; cvt.rn.satfinite.{PAIR}.f32 low, $2, $1;
            cvt.rn.satfinite.{PAIR}.f32 high, $4, $3; mov.b32 $0, {{low, high}}; }}""",
            "=r,f,f,f,f", [v0, v1, v2, v3], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = to_fp8(v0, CODES).to(tl.uint32)
        word |= to_fp8(v1, CODES).to(tl.uint32) << 8
        word |= to_fp8(v2, CODES).to(tl.uint32) << 16
        word |= to_fp8(v3, CODES).to(tl.uint32) << 24
    return word


@triton.jit
def observe(amax_ptr, amax):
    """Raise the fp32 at ``amax_ptr`` to ``amax``, NaN as Inf; a maximum does not depend on order."""
    bits = tl.minimum(amax.to(tl.int32, bitcast=True), 0x7F800000)
    cell = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tl.zeros(amax.shape, tl.int32)
    tl.atomic_max(cell, bits, sem="relaxed")
