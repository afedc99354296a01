"""From a spec to a quantized tensor: the one place where a recipe's fields become a kernel's plain arguments."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.dispatch import fuses_mx, quantize_mx, quantize_mx_codes
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.quantize.reference import Uniform, block_amax, decode, fp32_encode_scale, quantize_operand
from megatron_lowprec.kernels.quantize.rule import Direction, MxRule
from megatron_lowprec.quantization.device_rng_step import device_rng_step, refuse_capture
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes
from megatron_lowprec.quantization.transform import Transform, padded
from megatron_lowprec.recipe.schema import QuantSpec

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Elementwise maximum of an amax over the ranks that hold parts of the tensor."""


@torch.no_grad()
def quantize(
    x: torch.Tensor, spec: QuantSpec, *, axis: int = -1, random: RandomStream | torch.Tensor | None = None
) -> QuantizedTensor:
    """Quantize a tensor with scales along ``axis``; no gradient flows through it.

    Args:
        x: fp32, bf16 or fp16, one or more dimensions; computed in fp32.
        spec: what to do. ``scaling="delayed"`` is taken as current: a tensor by itself has no history.
        axis: the dimension that a product would contract; tiles run along it, their rows over all others, flattened.
        random: for stochastic rounding, a stream, or fp32 draws u in [0, 1) of the shape of x (magnitudes are floor(t
            + u)).

    Returns:
        codes, decode scales and ``dequantize``; its layout is the source's.

    Raises:
        UserError: stochastic rounding without ``random``, or x of whole numbers.
    """
    if not x.is_floating_point():
        raise UserError(f"quantize takes floating-point tensors, got {x.dtype}: convert it first")
    if x.dim() == 0:
        raise UserError("quantize takes tensors of one dimension or more, got a single number: use x.view(1)")
    last = x.movedim(axis, -1)
    matrix = last.reshape(-1, last.shape[-1])
    if isinstance(random, torch.Tensor):
        random = random.movedim(axis, -1).reshape(matrix.shape)
    stream = RandomStream((0, 0)) if random is None and spec.rounding != "stochastic" else random
    if isinstance(stream, RandomStream) and fuses_mx(matrix, spec.block, spec.scale_format, 1):
        with torch.cuda.device_of(matrix):  # Triton starts kernels on the current device
            codes, scale = _quantized_by_kernel(matrix, spec, stream)
        return QuantizedTensor(decode(codes, FORMATS[spec.format]).to(x.dtype), scale, spec, last.shape, axis)
    elements, scale = _quantized_by_reference(matrix, spec, random)
    return QuantizedTensor(elements, scale, spec, last.shape, axis)


def quantize_for_gemm(
    matrix: torch.Tensor,
    spec: QuantSpec,
    *,
    random: RandomStream | None = None,
    rng_step: RngStep | None = None,
    transform: Transform | None = None,
    encode_scale: torch.Tensor | None = None,
    reduce_amax: Reduce | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An operand as an emulated product takes it.

    Args:
        matrix: [R, K] in the compute dtype, contracted dimension last, any strides.
        random, moment: of stochastic rounding; without a moment it is the stream's own.
        transform: applied first; K is then padded to whole blocks.
        encode_scale: a delayed scale, fp32 [1, 1].
        reduce_amax: for tiles ``tensor`` and ``row`` that ranks share.

    Returns:
        ``(dequantized operand, None)`` for power-of-two scales, else ``(elements, fp32 decode scales)``; in the dtype
        of ``matrix``, where both are exact. Headroom is left in: the product's alpha takes it out.
    """
    if fuses_mx(matrix, spec.block, spec.scale_format, transform.block if transform else 1):
        if matrix.stride(1) == 1:
            return _given(_fused(matrix, spec, random, None, transform, None, rng_step)[0]), None
        return _given(_fused(matrix.t(), spec, None, random, None, transform, rng_step)[1]).t(), None
    if random is not None and rng_step is not None:
        random = random.at(rng_step)
    dequantize = spec.power_of_two_scale
    elements, scale = _quantized_by_reference(
        matrix, spec, random, transform, encode_scale, reduce_amax, dequantize=dequantize
    )
    return elements.to(matrix.dtype), None if dequantize else scale


def quantize_by_reference(
    matrix: torch.Tensor,
    spec: QuantSpec,
    *,
    random: RandomStream,
    rng_step: RngStep,
    transform: Transform | None = None,
    encode_scale: torch.Tensor | None = None,
    reduce_amax: Reduce | None = None,
) -> tuple[torch.Tensor, QuantizedTensor]:
    """``quantize_for_gemm`` taken apart: the matrix as it is rounded, behind its transform, and what it becomes."""
    if transform is not None:
        matrix = transform.apply(matrix)
    elements, scale = _quantized_by_reference(
        matrix, spec, random.at(rng_step), encode_scale=encode_scale, reduce_amax=reduce_amax
    )
    return matrix, QuantizedTensor(elements, scale, spec, matrix.shape)


def quantize_both_ways(
    matrix: torch.Tensor,
    spec: QuantSpec,
    random: tuple[RandomStream, RandomStream],
    transforms: tuple[Transform | None, Transform | None],
    rng_step: RngStep | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``quantize_for_gemm`` of a matrix and of its transpose from one read, where one kernel can do so, else None.

    Args:
        matrix: [M, N], row-major.
        spec: of both operands.
        random, transforms: of the matrix and of its transpose.
    """
    blocks = {transform.block if transform else 1 for transform in transforms}
    if matrix.stride(1) != 1 or len(blocks) > 1 or not fuses_mx(matrix, spec.block, spec.scale_format, blocks.pop()):
        return None
    rows, columns = _fused(matrix, spec, *random, *transforms, rng_step)
    return _given(rows), _given(columns).t()


@lru_cache(maxsize=64)
def mx_rule(spec: QuantSpec) -> MxRule:
    """The spec's fields as the fused MX kernel takes them."""
    return MxRule(FORMATS[spec.format], spec.scale_rule, spec.rounding, spec.random_bits, spec.headroom)


def _fused(
    matrix: torch.Tensor,
    spec: QuantSpec,
    row_random: RandomStream | None,
    column_random: RandomStream | None,
    row_transform: Transform | None,
    column_transform: Transform | None,
    rng_step: RngStep | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The Triton kernel along the rows and columns of [M, N] for which a stream is given."""

    def way(random: RandomStream | None, transform: Transform | None) -> Direction | None:
        if random is None:
            return None
        return Direction(Key.of(random.key), None if transform is None else transform.scaled_signs(matrix.device))

    stream = row_random or _given(column_random)
    spans = (stream.row_span, stream.column_span)
    return quantize_mx(
        matrix,
        mx_rule(spec),
        rows=way(row_random, row_transform),
        columns=way(column_random, column_transform),
        rng_step=device_rng_step(stream.rng_step if rng_step is None else rng_step, matrix.device),
        spans=spans if row_random is not None else (spans[1], spans[0]),
    )


def _quantized_by_kernel(matrix: torch.Tensor, spec: QuantSpec, random: RandomStream) -> tuple[torch.Tensor, ...]:
    """Codes, one an entry, and scale bytes of [R, K] with K whole blocks, by the fused kernel."""
    by_rows = matrix.stride(1) == 1
    way = Direction(Key.of(random.key))
    spans = (random.row_span, random.column_span)
    made = quantize_mx_codes(
        matrix if by_rows else matrix.t(),
        mx_rule(spec),
        rows=way if by_rows else None,
        columns=None if by_rows else way,
        rng_step=device_rng_step(random.rng_step, matrix.device),
        spans=spans if by_rows else spans[::-1],
    )[0 if by_rows else 1]
    codes, scale = _given(made)
    if FORMATS[spec.format].bits == 4:
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1)
    return codes[:, : matrix.shape[1]], scale


def _quantized_by_reference(
    matrix: torch.Tensor,
    spec: QuantSpec,
    random: RandomStream | torch.Tensor | None,
    transform: Transform | None = None,
    encode_scale: torch.Tensor | None = None,
    reduce_amax: Reduce | None = None,
    *,
    dequantize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scale of [R, K] by ``quantize_operand``.

    ``encode_scale`` is the matrix's own where none is given and tiles are no blocks. It asks for the whole transformed
    matrix first; elsewhere the transform is left to ``quantize_operand``, which has but some rows of that in fp32 at a
    time.
    """
    if spec.block is None and encode_scale is None:
        if transform is not None:
            matrix, transform = transform.apply(matrix), None
        encode_scale = current_encode_scale(matrix, spec, reduce_amax)
    signs = None
    if transform is not None:
        matrix, signs = padded(matrix, transform.block), transform.signs(matrix.device)
    arguments = kernel_arguments(matrix, spec, random)
    return quantize_operand(matrix, **arguments, encode_scale=encode_scale, signs=signs, dequantize=dequantize)


def _given(value: Any) -> Any:
    assert value is not None
    return value


def current_encode_scale(matrix: torch.Tensor, spec: QuantSpec, reduce_amax: Reduce | None = None) -> torch.Tensor:
    """fp32 encode scale of granularity ``tensor`` [1, 1] or ``row`` [R, 1] from the matrix itself."""
    amax = block_amax(matrix, block_sizes(spec, matrix))
    if reduce_amax is not None:
        amax = reduce_amax(amax)
    return fp32_encode_scale(amax, FORMATS[spec.format], spec.scale_rule, spec.amax_floor)


def delayed_encode_scale(amax_in_effect: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """fp32 encode scale [1, 1] from an amax of earlier steps; 1 before there is one."""
    scale = fp32_encode_scale(amax_in_effect, FORMATS[spec.format], spec.scale_rule, spec.amax_floor, spec.margin)
    return scale.view(1, 1)


def kernel_arguments(
    matrix: torch.Tensor, spec: QuantSpec, random: RandomStream | torch.Tensor | None
) -> dict[str, Any]:
    """The spec's fields as the kernel names them."""
    return {
        "fmt": FORMATS[spec.format],
        "block": block_sizes(spec, matrix),
        "scale_format": spec.scale_format,
        "scale_rule": spec.scale_rule,
        "rounding": spec.rounding,
        "headroom": spec.headroom,
        "amax_floor": spec.amax_floor,
        "uniform": _uniform(matrix, spec, random),
    }


def _uniform(matrix: torch.Tensor, spec: QuantSpec, random: RandomStream | torch.Tensor | None) -> Uniform | None:
    if spec.rounding != "stochastic":
        return None
    if random is None:
        raise UserError("stochastic rounding was asked without randomness: pass random=RandomStream(key=...)")
    if isinstance(random, torch.Tensor):
        draws = random
        return lambda rows: draws[rows]
    refuse_capture("stochastic rounding runs")
    return random.uniform(matrix.shape[1], spec.random_bits, matrix.device)
