"""Scales and rounding in plain torch: the definition of every quantized bit in the project.

All operations are single IEEE operations in fp32, so codes and scales are equal on every device. Operands are [R, K]
with the contracted dimension last. A block is (rows, columns); partial blocks at the edges are scaled by their own
entries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_lowprec.formats import E8M0_NAN, FORMATS, Format
from megatron_lowprec.kernels.chunks import row_chunks
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.blocks import block_amax as block_amax
from megatron_lowprec.kernels.quantize.blocks import scale_blocks as scale_blocks
from megatron_lowprec.kernels.quantize.coded_scale import PLAIN, CodedOptions, of_candidate, quantize_coded
from megatron_lowprec.kernels.quantize.coded_scale import TensorScale as TensorScale
from megatron_lowprec.kernels.quantize.coded_scale import coded_scale as coded_scale
from megatron_lowprec.kernels.quantize.coded_scale import tensor_scale as tensor_scale
from megatron_lowprec.kernels.quantize.elements import decode as decode
from megatron_lowprec.kernels.quantize.elements import encode as encode
from megatron_lowprec.kernels.quantize.elements import round_to_format as round_to_format
from megatron_lowprec.kernels.quantize.elements import uniform_from_bits as uniform_from_bits
from megatron_lowprec.scaling import CODED_SCALE_FORMATS, SCALE_RULES

_EXPONENT_FIELD = 0x7F800000
_MANTISSA_FIELD = 0x007FFFFF
_HALF_OF_MIN_NORMAL = 0x00400000  # bits of 2^-127, subnormal in fp32 but a valid E8M0 scale
_NAN = 0x7FC00000
_FP32_MAX = torch.finfo(torch.float32).max

Uniform = Callable[[slice], torch.Tensor]
"""Row slice of the operand -> fp32 draws u of stochastic rounding, [rows, K] or [2, rows, K], in [0, 1)."""


# ---- scales
def e8m0_scale(amax: torch.Tensor, fmt: Format, rule: str) -> torch.Tensor:
    """E8M0 decode scale of each block from its amax, by an E8M0 rule of ``scaling.SCALE_RULES``.

    Zero gives byte 0 (2^-127); NaN and Inf give ``E8M0_NAN``; the exponent saturates to [-127, 127]. floor(log2) is
    the exponent field, since a floating-point log2 errs just below powers of two.

    Args:
        amax: fp32, any shape, not negative.

    Returns:
        uint8, the shape of ``amax``.
    """
    row = SCALE_RULES[rule]
    number = amax / torch.full_like(amax, fmt.max) if row.divides else amax
    bits = number.view(torch.int32)
    if row.rounds_amax:
        # half a step of the mantissa; a subnormal number that can leave byte 0 lies in the binade below
        bits = bits + torch.where(bits < 1 << 23, 1 << (21 - fmt.mantissa_bits), 1 << (22 - fmt.mantissa_bits))
    byte = bits >> 23
    if row.rounds_up:
        # a subnormal number is at most 2^-127, byte 0, or at most 2^-126, byte 1
        at_most_power = torch.where(byte == 0, _HALF_OF_MIN_NORMAL, 0)
        byte = byte + ((bits & _MANTISSA_FIELD) > at_most_power)
    if not row.divides:
        byte = byte - fmt.max_exponent
    byte = byte.clamp_(0, E8M0_NAN - 1)
    return torch.where(amax.isfinite(), byte, E8M0_NAN).to(torch.uint8)


def e8m0_decode_scale(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> fp32 decode scale, which multiplies a decoded element: 2^(byte - 127), NaN for 255."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 0, _HALF_OF_MIN_NORMAL, b << 23)
    return torch.where(b == E8M0_NAN, _NAN, bits).view(torch.float32)


def e8m0_encode_scale(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes -> fp32 encode scale, which multiplies an entry before rounding: 2^(127 - byte), NaN for 255."""
    b = byte.to(torch.int32)
    bits = torch.where(b == E8M0_NAN - 1, _HALF_OF_MIN_NORMAL, (E8M0_NAN - 1 - b) << 23)
    return torch.where(b == E8M0_NAN, _NAN, bits).view(torch.float32)


def fp32_encode_scale(
    amax: torch.Tensor, fmt: Format, rule: str, amax_floor: float = 0.0, margin: int = 0
) -> torch.Tensor:
    """fp32 encode scale, which multiplies a block before rounding: s = fl((M / 2^margin) / amax), M = ``fmt.max``.

    The decode scale is fl(1 / s). ``amax_pow2`` truncates s to a power of two. amax 0 gives 1. A quotient beyond fp32
    gives its maximum, as in TransformerEngine's delayed scaling; one below 2^-127 gives that, whose reciprocal is
    finite. NaN and Inf give NaN, so that they propagate.

    Args:
        amax: fp32, any shape, not negative.

    Returns:
        fp32, the shape of ``amax``.
    """
    # fp64 holds amax_floor unrounded, and its quotient rounds to the correctly rounded fp32 one
    scaled_max = torch.full_like(amax, fmt.max * 2.0**-margin, dtype=torch.float64)
    scale = (scaled_max / amax.double().clamp(min=amax_floor)).float().clamp_(max=_FP32_MAX)
    scale = torch.where((amax == 0) & (amax_floor == 0.0), torch.ones_like(scale), scale)
    if SCALE_RULES[rule].power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)
    return torch.where(amax.isfinite(), scale.clamp(min=2.0**-127), torch.nan)


# ---- operands
def quantize_operand(
    x: torch.Tensor,
    fmt: Format,
    block: tuple[int, int],
    *,
    scale_format: str,
    scale_rule: str,
    rounding: str = "nearest_even",
    headroom: float = 1.0,
    amax_floor: float = 0.0,
    encode_scale: torch.Tensor | None = None,
    of_tensor: TensorScale | None = None,
    signs: torch.Tensor | None = None,
    uniform: Uniform | None = None,
    scale_rounding: str = "nearest_even",
    scale_uniform: Uniform | None = None,
    options: CodedOptions = PLAIN,
    outer_block: tuple[int, int] | None = None,
    dequantize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transform, scale and round an operand.

    Args:
        x: [R, K] bf16, fp16 or fp32, any strides; K a multiple of len(signs) if ``signs`` is given.
        block: (rows, columns) that share a scale.
        scale_format, scale_rule, rounding, headroom, amax_floor: as in ``recipe.schema.QuantSpec``.
        encode_scale: fp32, one entry a block, if the scale is known (delayed, or shared by ranks).
        of_tensor: scale of the tensor, or of its outer blocks, above coded block scales; None for no such level.
        signs: [g], applies the Hadamard transform first.
        uniform: draws of stochastic rounding.
        scale_rounding, scale_uniform: of coded scales; a block takes the draw of its first entry.
        options: other fields of coded scales.
        outer_block: (rows, columns) under one entry of ``of_tensor``, whole blocks; None for the tensor, or each row.
        dequantize: multiply the elements by their block's scale; exact in bf16's range for a power of two and for the
            coded scales of a ``QuantSpec``.

    Returns:
        elements: [R, K] in the dtype of x, values on the grid of ``fmt`` (exact in bf16), or dequantized.
        scale: fp32 decode scales, or codes of block scales (uint8), [ceil(R / rows), ceil(K / columns)].
    """
    elements = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = [
        torch.empty(0, -(-x.shape[1] // block[1]), dtype=torch.float32 if scale_format == "fp32" else torch.uint8)
    ]
    shared = encode_scale is not None and encode_scale.shape[0] == 1
    scale_rows = 1 if shared else block[0] if outer_block is None else outer_block[0]
    for chunk in row_chunks(x.shape[0], x.shape[1], x.device, multiple_of=scale_rows):
        part = x[chunk].to(torch.float32) if signs is None else hadamard_transform(x[chunk], signs)
        draws = uniform(chunk) if uniform is not None and rounding == "stochastic" else None

        def round_scaled(scaled: torch.Tensor, candidate: int = 0, draws: torch.Tensor | None = draws) -> torch.Tensor:
            scaled = scaled * headroom if headroom != 1.0 else scaled
            return round_to_format(scaled, fmt, rounding, of_candidate(draws, candidate))

        if encode_scale is None and scale_format in CODED_SCALE_FORMATS:
            above = None if of_tensor is None else _above(of_tensor, chunk, block, outer_block, x.shape[1])
            for_scales = None if scale_uniform is None else scale_uniform(chunk)[..., :: block[0], :: block[1]]
            scale_fmt = FORMATS[scale_format]
            rounded, decoder = quantize_coded(
                part, fmt, scale_fmt, block, scale_rule, above, options, round_scaled, scale_rounding, for_scales
            )
            scale = encode(decoder, scale_fmt)
        else:
            if encode_scale is not None:
                rows = slice(chunk.start // scale_rows, -(-chunk.stop // scale_rows))
                encoder = encode_scale if shared else encode_scale[rows]
                scale = decoder = torch.ones_like(encoder) / encoder
            elif scale_format == "e8m0":
                scale = e8m0_scale(block_amax(part, block), fmt, scale_rule)
                encoder, decoder = e8m0_encode_scale(scale), e8m0_decode_scale(scale)
            else:
                encoder = fp32_encode_scale(block_amax(part, block), fmt, scale_rule, amax_floor)
                scale = decoder = torch.ones_like(encoder) / encoder
            rounded = round_scaled(scale_blocks(part, encoder, block))
        scales.append(scale)
        elements[chunk] = scale_blocks(rounded, decoder, block) if dequantize else rounded
    return elements, scales[-1] if shared or len(scales) == 1 else torch.cat(scales[1:])


def _above(
    of_tensor: TensorScale, rows: slice, block: tuple[int, int], outer: tuple[int, int] | None, columns: int
) -> TensorScale:
    """The scales above the blocks of some rows of an operand, for all or for each block."""
    if outer is None:
        return TensorScale(*(scale[rows] if len(scale) > 1 else scale for scale in of_tensor))
    of_rows = TensorScale(*(scale[rows.start // outer[0] : -(-rows.stop // outer[0])] for scale in of_tensor))
    down, across = -(-(rows.stop - rows.start) // block[0]), -(-columns // block[1])
    return TensorScale(*(scale[:down, :across] for scale in of_rows.over((outer[0] // block[0], outer[1] // block[1]))))
