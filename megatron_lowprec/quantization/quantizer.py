"""Quantization of a tensor by a ``QuantSpec``; maps a recipe's fields to plain kernel arguments."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.dispatch import fuses_mx, load
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.quantize.coded_scale import CodedOptions
from megatron_lowprec.kernels.quantize.elements import unpacked
from megatron_lowprec.kernels.quantize.reference import (
    Uniform,
    block_amax,
    decode,
    fp32_encode_scale,
    quantize_operand,
    tensor_scale,
)
from megatron_lowprec.kernels.quantize.rule import MX_BLOCKS, CodedMatrix, Direction, MxRule
from megatron_lowprec.quantization.device_rng_step import device_rng_step, refuse_capture
from megatron_lowprec.quantization.random_stream import RandomStream
from megatron_lowprec.quantization.tensor import QuantizedTensor, block_sizes
from megatron_lowprec.quantization.transform import Transform, padded
from megatron_lowprec.recipe.schema import HadamardSpec, QuantSpec

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Returns the elementwise maximum of an amax over the ranks that hold parts of the tensor."""


class QuantizedOperand(NamedTuple):
    """Data [R, K] and its scales: of blocks, as ``quantize_operand``, and the decode scale above them, fp32, or None.

    That is [1, 1] of the tensor, or one for each outer block.
    """

    data: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor | None = None


@torch.no_grad()
def quantize(
    x: torch.Tensor,
    spec: QuantSpec,
    *,
    axis: int = -1,
    random: RandomStream | torch.Tensor | None = None,
    group: int | None = None,
) -> QuantizedTensor:
    """Quantize a tensor with scales along ``axis``; without gradient.

    Args:
        x: fp32, bf16 or fp16, one or more dimensions; computed in fp32.
        spec: format, scale and rounding. ``scaling="delayed"`` is treated as current, since there is no history;
            ``source="fprop"`` as original, since there is no other operand.
        axis: contracted dimension; blocks run along it, and their rows over all other dimensions, flattened.
        random: for stochastic rounding, a stream, or fp32 draws u in [0, 1) of the shape of x (magnitudes are floor(t
            + u)), which elements and scales then share; two of that shape give four-over-six others at four.
        group: entries along ``axis`` that share a ``correction``, whole blocks: the block of the Hadamard transform
            that x has had.

    Returns:
        A tensor with codes, decode scales and ``dequantize`` in the layout of x.

    Raises:
        UserError: stochastic rounding without ``random``, or draws of another shape; a correction without ``group``, or
            with one of partial blocks; x of integers or FP8, zero-dimensional, without ``axis``, or without entries
            along it; a ``spec`` or ``random`` of another type.
    """
    if not isinstance(spec, QuantSpec):
        raise UserError(f"quantize got {type_of(spec)} as spec: give a QuantSpec, such as a recipe's fprop.input")
    if not isinstance(random, RandomStream | torch.Tensor | None):
        raise UserError(f"quantize got {type_of(random)} as random: give a RandomStream, or draws as a tensor")
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        raise UserError(f"quantize takes floating-point tensors of 16 bits or more, got {x.dtype}: convert it first")
    if x.dim() == 0:
        raise UserError("quantize takes tensors of one dimension or more, got a single number: use x.view(1)")
    if not isinstance(axis, int) or not -x.dim() <= axis < x.dim():
        raise UserError(f"quantize got axis {axis}, but the tensor has {x.dim()} dimensions, numbered from 0")
    if x.shape[axis] == 0:
        raise UserError(f"quantize got a tensor of shape {tuple(x.shape)}, which has no entries along axis {axis}")
    if spec.scaling == "delayed":
        spec = spec.with_current_scaling()
    last = x.movedim(axis, -1)
    matrix = last.reshape(-1, last.shape[-1])
    if isinstance(random, torch.Tensor):
        candidates = 2 if spec.scale.four_over_six else 1
        if random.shape not in (x.shape, (candidates, *x.shape), (2, *x.shape)):
            raise UserError(f"quantize got draws of shape {tuple(random.shape)} for a tensor of {tuple(x.shape)}")
        of_x = axis if axis < 0 else axis - x.dim()  # two candidates' draws have a dimension more
        random = random.movedim(of_x, -1).reshape(*random.shape[: random.dim() - x.dim()], *matrix.shape)
    stream = RandomStream((0, 0)) if random is None and not spec.random else random
    if isinstance(stream, RandomStream) and fuses_mx(matrix, mx_rule(spec), codes=True):
        with torch.cuda.device_of(matrix):  # Triton starts kernels on the current device
            codes, scale, of_tensor = _quantize_by_kernel(matrix, spec, stream)
        elements = decode(codes, FORMATS[spec.format]).to(x.dtype)
    else:
        elements, scale, of_tensor = quantize_by_reference(matrix, spec, random, group=group)
    return QuantizedTensor(last.shape, x.dtype, spec, elements, scale, axis=axis, rowwise_tensor_scale=of_tensor)


@lru_cache(maxsize=64)
def mx_rule(spec: QuantSpec, transform: HadamardSpec | None = None) -> MxRule | None:
    """The ``MxRule`` of a spec behind a transform, for the fused MX kernel; None for what it does not quantize."""
    if spec.block is None or spec.scale_format == "fp32" or spec.outer_block is not None:
        return None
    if spec.correction is not None and transform is None:
        return None
    (rows, block), square = spec.block, spec.block[0] == spec.block[1] and not spec.random
    if block not in MX_BLOCKS or not (rows == 1 or square):
        return None
    margin = spec.margin if spec.scaling == "delayed" else 0
    return MxRule(
        FORMATS[spec.format],
        spec.scale_rule,
        spec.rounding,
        spec.random_bits,
        spec.headroom,
        block,
        block_rows=rows,
        scale_fmt=FORMATS.get(spec.scale_format),
        target=None if spec.tensor_scale is None else spec.tensor_scale.target * 2.0**-margin,
        rounds_transform=transform is not None and transform.output == "operand",
        scale_rounding=spec.scale.rounding,
        options=_coded_options(spec, None if transform is None else transform.block),
    )


def with_amaxes(
    matrix: torch.Tensor | CodedMatrix,
    rule: MxRule,
    rows: Direction | None,
    columns: Direction | None,
    known: torch.Tensor | None = None,
    reduce_amax: Reduce | None = None,
) -> dict[str, Direction | None]:
    """Arguments ``rows`` and ``columns`` of the fused kernel, with the amaxes that a tensor scale takes.

    Args:
        matrix: [M, N] as the kernel reads it.
        known: fp32 of one entry, from a history; None to find them, in one read, over the ranks of ``reduce_amax``.
    """
    ways = {"rows": rows, "columns": columns}
    if rule.target is None:
        return ways
    if known is None:
        found = load("amax").operand_amaxes(matrix, **ways, rounds_transform=rule.rounds_transform)
        of_rows, of_columns = (found if reduce_amax is None else reduce_amax(found)).unbind()
    else:
        of_rows = of_columns = known
    return {"rows": rows and rows._replace(amax=of_rows), "columns": columns and columns._replace(amax=of_columns)}


def _quantize_by_kernel(
    matrix: torch.Tensor, spec: QuantSpec, random: RandomStream
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Codes, one an entry, their scales and the tensor's of [R, K] by the fused kernel; K a multiple of the block."""
    by_rows, rule = matrix.stride(1) == 1, mx_rule(spec)
    assert rule is not None
    way = Direction(Key.of(random.key), scale_key=Key.of(random.of_scales().key))
    spans = (random.row_span, random.column_span)
    read = matrix if by_rows else matrix.t()
    cast = load("quantize").quantize_mx(
        read,
        rule,
        **with_amaxes(read, rule, way if by_rows else None, None if by_rows else way),
        rng_step=device_rng_step(random.rng_step, matrix.device),
        spans=spans if by_rows else spans[::-1],
        codes=True,
    )
    codes, scale, of_tensor = cast.direction(by_rows)
    assert codes is not None
    if FORMATS[spec.format].bits == 4:
        codes = unpacked(codes)
    return codes[:, : matrix.shape[1]], scale, of_tensor


def quantize_by_reference(
    matrix: torch.Tensor,
    spec: QuantSpec,
    random: RandomStream | torch.Tensor | None = None,
    transform: Transform | None = None,
    encode_scale: torch.Tensor | None = None,
    reduce_amax: Reduce | None = None,
    *,
    tensor_amax: torch.Tensor | None = None,
    group: int | None = None,
    dequantize: bool = False,
) -> QuantizedOperand:
    """Data and decode scales of a matrix by ``kernels.quantize.reference.quantize_operand``, headroom included.

    A current scale of a row, of the tensor or of outer blocks needs the whole transformed matrix first. For blocks and
    delayed scales ``quantize_operand`` applies the transform, with a chunk of rows in fp32 at a time.

    Args:
        matrix: [R, K], contracted dimension last, any strides.
        random: draws of stochastic rounding: a stream, or fp32 [R, K]; or [2, R, K], of which four-over-six takes the
            second for the elements at four.
        transform: applied first; K is then padded to whole blocks.
        encode_scale: fp32 [1, 1], known beforehand.
        reduce_amax: maximum over the ranks that share a current scale.
        tensor_amax: fp32 amax of earlier steps, of delayed scaling; [R] for a tensor scale, if each row is a tensor of
            its own. None for a current one.
        group: entries that share a correction, if the matrix was transformed before.
        dequantize: multiply data by their block's scale, exact if ``spec.folds_scale``.
    """
    above, outer = spec.tensor_scale, spec.outer_block
    group = group if transform is None else transform.block
    has_amax = tensor_amax is not None or encode_scale is not None
    if tensor_amax is not None and above is None:
        encode_scale = delayed_encode_scale(tensor_amax, spec)
    needs_all = (spec.block is None or above is not None) and not has_amax
    if transform is not None and (needs_all or transform.rounds(matrix.dtype)):
        matrix, transform = transform.apply(matrix), None
    if needs_all and above is None:
        encode_scale = current_encode_scale(matrix, spec, reduce_amax)
    elif needs_all:
        tensor_amax = block_amax(matrix, outer or (max(1, matrix.shape[0]), max(1, matrix.shape[1])))
        tensor_amax = tensor_amax if reduce_amax is None or outer else reduce_amax(tensor_amax)
    of_tensor = signs = None
    options = _coded_options(spec, group)
    if above is not None and tensor_amax is not None:
        amax = tensor_amax if tensor_amax.dim() == 2 else tensor_amax.view(-1, 1)
        margin = spec.margin if spec.scaling == "delayed" else 0
        of_tensor = tensor_scale(amax, above.target, spec.scale_rule, margin, options.largest(FORMATS[spec.format]))
    if transform is not None:
        matrix, signs = padded(matrix, transform.block), transform.signs(matrix.device)
    data, scale = quantize_operand(
        matrix,
        **kernel_arguments(matrix, spec, random),
        options=options,
        encode_scale=encode_scale,
        of_tensor=of_tensor,
        outer_block=outer,
        signs=signs,
        dequantize=dequantize,
    )
    return QuantizedOperand(data, scale, None if of_tensor is None else of_tensor.decode)


def _coded_options(spec: QuantSpec, group: int | None) -> CodedOptions:
    scale, corrected = spec.scale, 0
    if spec.correction is not None:
        assert spec.block is not None
        if not isinstance(group, int) or group < 1 or group % spec.block[1]:
            raise UserError(
                f"correction {spec.correction} was asked with group {group}, but the groups of a Hadamard transform "
                "share its factor: pass the block of the transform that the tensor has had, a multiple of "
                f"{spec.block[1]} such as 128"
            )
        corrected = group
    return CodedOptions(scale.block_target, scale.four_over_six, scale.zero_code, corrected)


def current_encode_scale(matrix: torch.Tensor, spec: QuantSpec, reduce_amax: Reduce | None = None) -> torch.Tensor:
    """fp32 encode scale from the matrix's amax: [1, 1] for granularity ``tensor``, [R, 1] for ``row``."""
    amax = block_amax(matrix, block_sizes(spec, matrix))
    if reduce_amax is not None:
        amax = reduce_amax(amax)
    return fp32_encode_scale(amax, FORMATS[spec.format], spec.scale_rule, spec.amax_floor)


def delayed_encode_scale(amax_in_effect: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """fp32 encode scale [1, 1] from the amax of earlier steps; 1 before the first."""
    scale = fp32_encode_scale(amax_in_effect, FORMATS[spec.format], spec.scale_rule, spec.amax_floor, spec.margin)
    return scale.view(1, 1)


def kernel_arguments(
    matrix: torch.Tensor, spec: QuantSpec, random: RandomStream | torch.Tensor | None
) -> dict[str, Any]:
    """Arguments of ``quantize_operand`` that follow from the spec."""
    return {
        "fmt": FORMATS[spec.format],
        "block": block_sizes(spec, matrix),
        "scale_format": spec.scale_format,
        "scale_rule": spec.scale_rule,
        "rounding": spec.rounding,
        "headroom": spec.headroom,
        "amax_floor": spec.amax_floor,
        "uniform": _uniform(matrix, spec, random) if spec.rounding == "stochastic" else None,
        "scale_rounding": spec.scale.rounding,
        "scale_uniform": _uniform(matrix, spec, random.of_scales() if isinstance(random, RandomStream) else random)
        if spec.scale.rounding == "stochastic"
        else None,
    }


def _uniform(matrix: torch.Tensor, spec: QuantSpec, random: RandomStream | torch.Tensor | None) -> Uniform:
    if random is None:
        raise UserError("stochastic rounding was asked without randomness: pass random=RandomStream(key=(7, 0))")
    if isinstance(random, torch.Tensor):
        draws = random
        return lambda rows: draws[..., rows, :]
    refuse_capture("stochastic rounding runs")
    return random.uniform(matrix.shape[1], spec.random_bits, matrix.device)
