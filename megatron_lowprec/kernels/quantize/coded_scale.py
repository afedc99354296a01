"""Block scales that are codes of a format, one fp32 scale above them, and what depends on both: elements and codes.

The order of the roundings is the definition, since peers differ in it. fl marks a rounding to fp32; M is the magnitude
that a block's amax is mapped to, T the target of the scale above, A and B the amaxes of a block and of what that scale
covers, G = fl(T / B) and D its encode and decode scale:

======== ================================================ =========================
rule     decode scale D above the blocks                   block scale
======== ================================================ =========================
product  fl(1 / G)                                         code(fl(A fl(G fl(1 / M))))
base     fl(1 / G)                                         code(fl(fl(A / M) G))
quotient fl(B / T)                                         code(fl(fl(A / M) / D))
divided  fl(fl(B / fl(T / M)) / M)                         code(fl(fl(A / M) / D))
======== ================================================ =========================

An entry is multiplied by fl(1 / fl(code D)), in ``quotient`` by fl(fl(1 / D) / code).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_lowprec.formats import Format
from megatron_lowprec.kernels.quantize.blocks import block_amax, block_sum, scale_blocks
from megatron_lowprec.kernels.quantize.elements import round_to_format
from megatron_lowprec.scaling import SCALE_RULES

_FP32_MAX = torch.finfo(torch.float32).max
AT_FOUR = 1.5
"""Factor on a block's scale that maps its amax to 4 instead of 6."""


class CodedOptions(NamedTuple):
    """Fields of ``recipe.quant_spec.ScaleSpec`` and ``QuantSpec`` that only coded scales have, by their names there.

    Attributes:
        group: entries of a row that share a ``correction``; 0 for none.
    """

    block_target: float | None = None
    four_over_six: str | None = None
    zero_code: str = "zero"
    group: int = 0

    def largest(self, fmt: Format) -> float:
        """M, the magnitude that a block's amax is mapped to."""
        return fmt.max if self.block_target is None else self.block_target


PLAIN = CodedOptions()
"""The default of each field."""


class TensorScale(NamedTuple):
    """fp32 scales above block scales: ``encode`` multiplies entries, ``decode`` decoded elements.

    [1, 1] of a whole tensor; [R, 1], if each row of an operand is a tensor of its own; or one for each outer block.
    ``shortfall`` is encode times amax / T: 1, but less where encode ended at fp32's maximum.
    """

    encode: torch.Tensor
    decode: torch.Tensor
    shortfall: torch.Tensor

    def over(self, blocks: tuple[int, int]) -> "TensorScale":
        """Scales of blocks from those of outer blocks of (rows, columns) of them; possibly more than there are."""
        rows, columns = blocks
        return TensorScale(*(scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1) for scale in self))


def tensor_scale(
    amax: torch.Tensor, target: float, rule: str, margin: int = 0, largest: float | None = None
) -> TensorScale:
    """Scale above block scales from the amax that it covers, by a coded rule; T = target / 2^margin.

    ``product`` and ``base`` have encode = fl(T / amax) and decode = fl(1 / encode), ``quotient`` and ``divided`` a
    quotient as decode and encode = fl(1 / decode). amax 0 and a quotient that underflows give 1. Encode scales end at
    fp32's maximum; NaN and Inf give NaN.

    Args:
        amax: fp32, any shape, not negative.
        largest: M, of which only ``divided`` depends.
    """
    row = SCALE_RULES[rule]
    scaled_max = torch.full_like(amax, target * 2.0**-margin)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    known = torch.where(amax == 0, scaled_max, amax)
    if row.in_steps:
        assert largest is not None
        of_scales = torch.full_like(amax, target / largest * 2.0**-margin)
        first = (known / of_scales) / torch.full_like(amax, largest)
    else:
        first = known / scaled_max if row.divides else (scaled_max / known).clamp(max=_FP32_MAX)
    if row.divides:  # 0: of an amax too small to be divided
        first = torch.where((amax == 0) | (first == 0), 1.0, first)
    second = (torch.ones_like(first) / first).clamp(max=_FP32_MAX)
    encode, decode = (second, first) if row.divides else (first, second)
    shortfall = torch.where(encode == _FP32_MAX, known * encode / scaled_max, 1.0)
    return TensorScale(encode, decode, shortfall)


def coded_scale(
    amax: torch.Tensor,
    fmt: Format,
    scale_fmt: Format,
    rule: str,
    of_tensor: TensorScale | None,
    rounding: str = "nearest_even",
    uniform: torch.Tensor | None = None,
    options: CodedOptions = PLAIN,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and encode scale of each block's coded scale, by a coded rule of ``scaling.SCALE_RULES``.

    The value is A G / M rounded to ``scale_fmt``, saturating. The encode scale is the reciprocal of the value times the
    tensor's decode scale; for a value of 0 it is fp32's maximum, so entries saturate and decode to 0, or what
    ``options.zero_code`` says. NaN gives NaN, and so does Inf without a scale above; under a known one Inf saturates.

    Args:
        amax: fp32 amax A of each block, any shape.
        of_tensor: None for no scale above, else for each block or for all.
        uniform: draws of stochastic rounding, the shape of ``amax``.
        factor: multiplies A G / M, or A / M where that is divided by the scale above, rounded to fp32.

    Returns:
        fp32 values on the grid of ``scale_fmt``, and fp32 encode scales.
    """
    row, one = SCALE_RULES[rule], torch.ones((1, 1), device=amax.device)
    tensor = TensorScale(one, one, one) if of_tensor is None else of_tensor
    if of_tensor is None:
        amax = torch.where(amax.isfinite(), amax, torch.nan)
    largest = torch.full_like(one, options.largest(fmt))
    if row.divides:
        number = (amax / largest) * factor / tensor.decode
    elif row.scales_last:
        number = (amax / largest) * tensor.encode * factor
    else:
        number = amax * (tensor.encode * (one / largest)) * factor
    value = round_to_format(number, scale_fmt, rounding, uniform)
    if options.zero_code == "one":
        value = torch.where(value == 0, 1.0, value)
    if row.divides and not row.in_steps:
        encode_scale = tensor.encode / value
    else:
        encode_scale = torch.ones_like(value) / (value * tensor.decode)
    encode_scale = encode_scale.clamp(max=_FP32_MAX)
    return value, torch.where(value == 0, 0.0, encode_scale) if options.zero_code == "flush" else encode_scale


def quantize_coded(
    x: torch.Tensor,
    fmt: Format,
    scale_fmt: Format,
    block: tuple[int, int],
    rule: str,
    of_tensor: TensorScale | None,
    options: CodedOptions,
    round_scaled: Callable[[torch.Tensor, int], torch.Tensor],
    scale_rounding: str = "nearest_even",
    scale_uniform: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of x and the values of its blocks' coded scales.

    Args:
        x: fp32 [R, K].
        of_tensor: scale above the blocks, for all or for each of them.
        round_scaled: entries times their encode scale, and the candidate's number (1 at four, else 0) -> elements.
        scale_rounding, scale_uniform: of the scales, with draws as ``of_candidate``; with a correction, of the
            corrected ones, which take the first draws.

    Returns:
        fp32 [R, K] on the grid of ``fmt``, and fp32 values [ceil(R / rows), ceil(K / columns)] of scales.
    """
    amax = block_amax(x, block)
    first_rounding = "nearest_even" if options.group else scale_rounding

    def candidate(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        factor, draws = AT_FOUR if number else 1.0, of_candidate(scale_uniform, number)
        value, encoder = coded_scale(amax, fmt, scale_fmt, rule, of_tensor, first_rounding, draws, options, factor)
        scaled = scale_blocks(x, encoder, block)
        return value, scaled, round_scaled(scaled, number)

    value, scaled, elements = candidate(0)
    if options.four_over_six is not None:
        in_scales = x if of_tensor is None else scale_blocks(x, of_tensor.encode, block)
        shortfall = 1.0 if of_tensor is None else of_tensor.shortfall
        other = candidate(1)
        errors = [
            block_error(q, v * shortfall, in_scales, block, options.four_over_six)
            for v, _, q in ((value, scaled, elements), other)
        ]
        at_four = errors[1] < errors[0]
        value = torch.where(at_four, other[0], value)
        entries = scale_blocks(torch.ones_like(x), at_four.to(x.dtype), block) > 0
        scaled, elements = (torch.where(entries, new, old) for new, old in zip(other[1:], (scaled, elements)))
    if options.group:
        corrected = value * eden_correction(scaled, elements, block, options.group)
        value = round_to_format(corrected, scale_fmt, scale_rounding, of_candidate(scale_uniform, 0))
    return elements, value


def of_candidate(draws: torch.Tensor | None, number: int) -> torch.Tensor | None:
    """Draws [rows, columns] of the candidate at six, number 0, or at four, 1; both share those without [2, ...]."""
    return draws[number] if draws is not None and draws.dim() > 2 else draws


def block_error(
    elements: torch.Tensor, value: torch.Tensor, x: torch.Tensor, block: tuple[int, int], measure: str
) -> torch.Tensor:
    """Error of each block against x, in units of the scale above the blocks: neither overflows nor vanishes.

    Args:
        elements: fp32 [R, K].
        value: of the blocks' scales; its product with an element is exact, but where ``shortfall`` is below 1.
        x: fp32 [R, K], multiplied by the encode scale above the blocks.
        measure: ``"mse"``, the sum of squares; ``"mae"``, of magnitudes; ``"abs_max"``, the largest magnitude.
    """
    error = (scale_blocks(elements, value, block) - x).abs()
    if measure == "abs_max":
        return block_amax(error, block)
    return block_sum(error * error if measure == "mse" else error, block)


def eden_correction(v: torch.Tensor, elements: torch.Tensor, block: tuple[int, int], group: int) -> torch.Tensor:
    """EDEN's factor on the scale of each block: <v, v> / <v, elements> over its group, 1 where the divisor is 0.

    Args:
        v: fp32 [R, K], entries in units of their scale, before rounding.
        elements: v rounded.
        group: entries of a row that share the factor: the block of the Hadamard transform.
    """
    squares, products = (block_sum(v * other, (1, group)) for other in (v, elements))
    factor = torch.where(products == 0, 1.0, squares / products)
    blocks = -(-v.shape[1] // block[1])
    return factor.repeat_interleave(group // block[1], 1)[:, :blocks]
