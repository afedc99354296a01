"""Casts by the fused MX kernel: what depends on no data, draws or step is resolved once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megatron_lowprec.kernels.dispatch import fuses_mx, load
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.kernels.quantize.rule import CodedMatrix, Direction, MxCast, MxRule
from megatron_lowprec.linear.backends.protocol import LayerContext
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.device_rng_step import device_rng_step
from megatron_lowprec.quantization.quantizer import Reduce, mx_rule, with_amaxes
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transforms
from megatron_lowprec.recipe.schema import HadamardSpec, QuantSpec


class PlannedDirection(NamedTuple):
    """One direction of a cast.

    Attributes:
        gemm: whose operand it is.
        transform: that precedes it; None for none.
        key, scale_key, lanes_first: of ``Direction``.
    """

    gemm: str
    transform: HadamardSpec | None
    key: Key
    scale_key: Key
    lanes_first: bool = False

    def at(self, transforms: Transforms, rng_step: RngStep, device: torch.device) -> Direction:
        """The direction at an RNG step, without an amax."""
        found = None if self.transform is None else transforms.at(self.gemm, rng_step)
        signs = None if found is None else found.scaled_signs(device)
        return Direction(self.key, signs, None, self.scale_key, self.lanes_first)


class CastPlan(NamedTuple):
    """Constants of a tensor's casts for the same GEMMs, from matrices of one layout.

    Attributes:
        rule: of the kernel; None where it does not take the matrix, and the reference quantizes.
        reads_transpose: whether the kernel, which reads rows that are contiguous, reads the transpose of the matrix.
        rows, columns: directions of what it reads; None if not asked for.
        spans: of the rows and the columns that it reads.
        reduce_amax: maximum over the ranks that share a current scale; None without such ranks.
        transforms: of the layer.
    """

    rule: MxRule | None
    reads_transpose: bool
    rows: PlannedDirection | None
    columns: PlannedDirection | None
    spans: tuple[ShardSlice, ShardSlice]
    reduce_amax: Reduce | None
    transforms: Transforms

    def arguments(
        self, matrix: torch.Tensor | CodedMatrix, rng_step: RngStep, amax: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Arguments of ``quantize_mx`` for a matrix, or for its transpose, which the kernel reads instead.

        Args:
            amax: fp32 [1] over all ranks, for a tensor scale; None to find it.
        """
        read, device = matrix, (matrix if isinstance(matrix, torch.Tensor) else matrix.codes).device
        if self.reads_transpose:
            assert isinstance(matrix, torch.Tensor)
            read = matrix.t()
        assert self.rule is not None
        rows = None if self.rows is None else self.rows.at(self.transforms, rng_step, device)
        columns = None if self.columns is None else self.columns.at(self.transforms, rng_step, device)
        return {
            "x": read,
            "rule": self.rule,
            **with_amaxes(read, self.rule, rows, columns, amax, self.reduce_amax),
            "rng_step": device_rng_step(rng_step, device),
            "spans": self.spans,
        }

    def cast(
        self, matrix: torch.Tensor | CodedMatrix, rng_step: RngStep, amax: torch.Tensor | None = None, **outputs: Any
    ) -> MxCast:
        """``quantize_mx`` of a matrix with ``arguments``, directions as the matrix has them."""
        found: MxCast = load("quantize").quantize_mx(**self.arguments(matrix, rng_step, amax), **outputs)
        return found.transposed() if self.reads_transpose else found

    def quantized(
        self, matrix: torch.Tensor | QuantizedTensor, spec: QuantSpec | None, cast: MxCast
    ) -> QuantizedTensor:
        """The result of ``cast`` as that of a matrix."""
        by_row, by_column = (self.columns, self.rows) if self.reads_transpose else (self.rows, self.columns)
        row_data, row_scale, column_data, column_scale, row_above, column_above, _ = cast
        return QuantizedTensor(
            matrix.shape,
            matrix.dtype,
            spec,
            row_data,
            row_scale,
            column_data,
            column_scale,
            folded=row_scale is None and column_scale is None,
            rowwise_tensor_scale=row_above,
            columnwise_tensor_scale=column_above,
            rowwise_transform=None if by_row is None else by_row.transform,
            columnwise_transform=None if by_column is None else by_column.transform,
        )


class CastPlans:
    """Plans of a layer's casts, whose number depends on layouts and not on tokens.

    Args:
        context: of the layer.
        specs: by GEMM and tensor; None if not quantized.
        by_kernel: whether the kernel takes what it can.
    """

    def __init__(
        self, context: LayerContext, specs: Mapping[tuple[str, str], QuantSpec | None], by_kernel: bool
    ) -> None:
        self._context, self._specs, self._by_kernel = context, specs, by_kernel
        self._known: dict[tuple[Any, ...], CastPlan] = {}

    def of(
        self, tensor: str, matrix: torch.Tensor, rowwise: bool = True, columnwise: bool = False, codes: bool = False
    ) -> CastPlan:
        """The plan for x, w or dy, or for the codes, uint8, of a ``CodedMatrix``; sizes may be symbolic."""
        (rows, length), (down, along) = matrix.shape, matrix.stride()
        if not rowwise:
            length, down, along = rows, along, down
        length = int(length) if along == 1 else 0
        # blocks are powers of two
        layout = (length & -length, down == 1, not matrix.numel(), matrix.dtype, matrix.device)
        key = (tensor, rowwise, columnwise, codes, *layout)
        return self._known.get(key) or self._known.setdefault(key, self._new(matrix, *key[:4]))

    def _new(self, matrix: torch.Tensor, tensor: str, rowwise: bool, columnwise: bool, codes: bool) -> CastPlan:
        first, second = (
            self._way(gemm, tensor) if wanted else None
            for gemm, wanted in zip(SIDES[tensor], (rowwise, columnwise), strict=True)
        )
        if first is None:
            first, second = second, None
        assert first is not None
        operand = matrix if rowwise else matrix.t()
        by_rows, place = operand.stride(1) == 1, (first.gemm, tensor)
        spec, stream = self._specs[place], self._context.rounding[place]
        transforms = [way.transform for way in (first, second) if way is not None and way.transform is not None]
        transform = transforms[0] if transforms else None
        rule = None if spec is None else mx_rule(spec, transform)
        if rule is not None and second is not None:
            # one kernel has one block and one rounding of the transform
            one_transform = len({(each.block, each.output) for each in transforms}) <= 1
            rule = rule if one_transform and (rule.block_rows == 1 or rule.shares_directions) else None
        block = 1 if transform is None else transform.block
        fuses = self._by_kernel and (matrix.dtype == torch.uint8 or fuses_mx(operand, rule, block, codes))
        rows, columns = (first, second) if by_rows else (second, first)
        spans = (stream.row_span, stream.column_span) if by_rows else (stream.column_span, stream.row_span)
        reduce_amax = None if spec is None else self._context.layer_amax.reduction(*place, spec)
        transposes = by_rows != rowwise
        return CastPlan(
            rule if fuses else None, transposes, rows, columns, spans, reduce_amax, self._context.transforms
        )

    def _way(self, gemm: str, tensor: str) -> PlannedDirection:
        transform, spec = self._context.transforms.of(gemm), self._specs[gemm, tensor]
        stream = self._context.rounding[gemm, tensor]
        of_scales = spec is not None and spec.scale.rounding == "stochastic"
        scale_key = Key.of(stream.of_scales().key) if of_scales else Key()
        return PlannedDirection(gemm, None if transform is None else transform[0], Key.of(stream.key), scale_key)
