"""From a spec to a quantized tensor: the one place where a recipe's fields become a kernel's plain arguments."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.hadamard.reference import hadamard_transform
from megatron_lowprec.kernels.quantize.reference import Uniform, fp32_encode_scale, quantize_operand, tile_amax
from megatron_lowprec.quantization.random_stream import RandomStream
from megatron_lowprec.quantization.tensor import QuantizedTensor, tile_sizes
from megatron_lowprec.recipe.schema import QuantSpec

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Elementwise maximum of an amax over the ranks that hold parts of the tensor."""


def quantize(
    x: torch.Tensor, spec: QuantSpec, *, axis: int = -1, random: RandomStream | torch.Tensor | None = None
) -> QuantizedTensor:
    """Quantize a tensor with scales along ``axis``.

    Args:
        x: fp32, bf16 or fp16, one or more dimensions; computed in fp32.
        spec: what to do. ``scaling="delayed"`` is taken as current: a tensor by itself has no history.
        axis: the dimension that a product would contract; tiles run along it, their rows over all others, flattened.
        random: for stochastic rounding, a stream, or fp32 draws u in [0, 1) of the shape of x (magnitudes are floor(t
            + u)).

    Returns:
        codes, decode scales and ``dequantize``; its layout is the source's.

    Raises:
        UserError: stochastic rounding without ``random``.
    """
    last = x.movedim(axis, -1)
    matrix = last.reshape(-1, last.shape[-1])
    if isinstance(random, torch.Tensor):
        random = random.movedim(axis, -1).reshape(matrix.shape)
    encode_scale = None if spec.block else current_encode_scale(matrix, spec)
    elements, scale = quantize_operand(matrix, **kernel_arguments(matrix, spec, random), encode_scale=encode_scale)
    return QuantizedTensor(elements, scale, spec, last.shape, axis)


def quantize_for_gemm(
    matrix: torch.Tensor,
    spec: QuantSpec,
    *,
    random: RandomStream | None = None,
    signs: torch.Tensor | None = None,
    encode_scale: torch.Tensor | None = None,
    reduce_amax: Reduce | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An operand as an emulated product takes it.

    Args:
        matrix: [R, K] in the compute dtype, contracted dimension last, any strides.
        signs: [g] of the Hadamard transform, applied first.
        encode_scale: a delayed scale, fp32 of one entry.
        reduce_amax: for tiles ``tensor`` and ``row`` that ranks share.

    Returns:
        ``(dequantized operand, None)`` for power-of-two scales, else ``(elements, fp32 decode scales)``; in the dtype
        of ``matrix``, where both are exact. Headroom is left in: the product's alpha takes it out.
    """
    dtype = matrix.dtype
    if spec.block is None and encode_scale is None:
        if signs is not None:
            matrix, signs = hadamard_transform(matrix, signs), None
        encode_scale = current_encode_scale(matrix, spec, reduce_amax)
    dequantize = spec.power_of_two_scale
    arguments = kernel_arguments(matrix, spec, random)
    elements, scale = quantize_operand(
        matrix, **arguments, encode_scale=encode_scale, signs=signs, dequantize=dequantize
    )
    return elements.to(dtype), None if dequantize else scale


def current_encode_scale(matrix: torch.Tensor, spec: QuantSpec, reduce_amax: Reduce | None = None) -> torch.Tensor:
    """fp32 encode scale of tile ``tensor`` [1, 1] or ``row`` [R, 1] from the matrix itself."""
    amax = tile_amax(matrix, tile_sizes(spec, matrix))
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
        "tile": tile_sizes(spec, matrix),
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
    return random.uniform(matrix.shape[1], spec.random_bits, matrix.device)
