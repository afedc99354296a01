"""GEMMs in the compute dtype on values of a format's grid: its numerics on any device, not its speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from operator import mul
from typing import Any

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.dispatch import add_bias, fuses_mx, load
from megatron_lowprec.kernels.format_dtypes import DTYPES
from megatron_lowprec.kernels.gemm.fp8_accumulator import fp8_product
from megatron_lowprec.kernels.gemm.reference import Product, gemm
from megatron_lowprec.kernels.mx_gemm.operand import aligned_codes
from megatron_lowprec.kernels.quantize.reference import block_amax, encode, scale_blocks
from megatron_lowprec.kernels.quantize.rule import Direction, MxCast
from megatron_lowprec.linear.backends.emulated.cast_plan import CastPlans
from megatron_lowprec.linear.backends.emulated.codes_beside import CodesBeside, codes_beside, codes_for_wgrad
from megatron_lowprec.linear.backends.emulated.product_operand import ProductOperand
from megatron_lowprec.linear.backends.protocol import (
    CastRequest,
    KnownAmax,
    LayerContext,
)
from megatron_lowprec.linear.layer_tensors import in_memory
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.linear.sharding.gathered_weight import GatheredWeight
from megatron_lowprec.quantization.error_stats import error_stats
from megatron_lowprec.quantization.frozen_weight import FrozenWeight
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import Reduce, mx_rule, quantize_by_reference
from megatron_lowprec.quantization.random_stream import NO_DRAWS, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor, as_numbers, block_sizes, quantized_direction
from megatron_lowprec.quantization.token_rows import stored_codes
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, QuantSpec


class EmulatedGemms(CodesBeside):
    """``GemmBackend`` for any device; quantizes by the reference or by the fused MX kernel.

    Attributes:
        rounding, transforms: of the context.
        specs: spec by GEMM and tensor; None if not quantized.
        plans: of casts by the fused kernel.
        alpha: factor of each GEMM's fp32 sum.
        products: GEMMs that ``emulate_accumulator`` sums otherwise.
        packs: requested codes are bytes as kernels write them, in both directions, for a backend that multiplies them.
        by_kernel: casts run on the fused kernel where it has the rule.
    """

    packs, by_kernel = False, True

    one_cast = frozenset({"grad_output"})  # a second direction of x or w would occupy memory until the backward pass

    def __init__(self, context: LayerContext) -> None:
        recipe, self.rounding, self.transforms, self._amax, emulate_accumulator = context
        self.specs: dict[tuple[str, str], QuantSpec | None] = {
            (name, tensor): getattr(recipe.gemms[name], tensor)
            for name, tensors in GEMM_OPERANDS.items()
            for tensor in tensors
        }
        self.plans = CastPlans(context, self.specs, self.by_kernel)
        self.can_save_codes = codes_for_wgrad(recipe) and self.by_kernel and not self.packs
        weights = {self.specs[gemm, "weight"] for gemm in SIDES["weight"]}
        if any(spec is not None and spec.block is not None and spec.block[0] > 1 for spec in weights):
            self.one_cast = self.one_cast | {"weight"}  # the directions of square blocks share their memory
        # divides the headroom of both operands out of the product
        self.alpha = {
            name: 1.0 / math.prod(spec.headroom for tensor in tensors if (spec := self.specs[name, tensor]))
            for name, tensors in GEMM_OPERANDS.items()
        }

        self.products: dict[str, Product] = {
            name: partial(fp8_product, a_format=formats[0], b_format=formats[1])
            for name, tensors in GEMM_OPERANDS.items()
            if emulate_accumulator and recipe.gemms[name].quantized and recipe.gemms[name].fast_accumulation
            if (formats := [FORMATS[spec.format] for tensor in tensors if (spec := self.specs[name, tensor])])
        }

    def quantize(
        self,
        tensor: str,
        matrix: torch.Tensor | CastPrologue,
        rng_step: RngStep,
        request: CastRequest,
        amax: KnownAmax | None = None,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """As ``GemmBackend``; takes only amaxes over all ranks, and leaves sums to the caller."""
        frozen = matrix if isinstance(matrix, FrozenWeight) else None
        matrix, (rowwise, columnwise, update_amax, _, codes, beside) = in_memory(matrix), request
        name = SIDES[tensor][not rowwise]
        spec = self.specs[name, tensor]
        if spec is None or matrix.numel() == 0:  # an expert may get no tokens
            operand, transform = matrix if rowwise else matrix.t(), self.transform(name, rng_step)
            data = operand if transform is None else transform.apply(operand).to(operand.dtype)
            return quantized_direction(matrix, spec, rowwise, data, transform), None
        if spec.scaling == "delayed" and update_amax and self._amax.records:
            history, slot = self._amax.histories[tensor]
            history.update_amax(slot, block_amax(matrix, (matrix.shape[0], matrix.shape[1])))
        of_fprop = matrix if frozen is None else frozen
        known = amax.value if amax is not None and amax.reduced else None
        source = matrix
        if spec.source == "fprop":
            source, known = self._of_fprop(tensor, of_fprop, rng_step, known), None
        plan = self.plans.of(tensor, source, rowwise, columnwise, codes)
        if plan.rule is not None:
            if known is None and spec.scaling == "delayed":
                known = self._known_amax(tensor, spec)
            # as plan.cast, with a call less between a layer and its launch
            outputs = {"codes": codes, "beside": beside, "out_dtype": matrix.dtype}
            cast: MxCast = load("quantize").quantize_mx(**plan.arguments(source, rng_step, known), **outputs)
            quantized = plan.quantized(matrix, spec, cast.transposed() if plan.reads_transpose else cast)
            if codes and not self.packs:
                side = "rowwise_data" if rowwise else "columnwise_data"
                setattr(quantized, side, stored_codes(getattr(quantized, side), spec, matrix.dtype))
            if beside:
                quantized.beside = codes_beside(quantized, cast)
            return quantized, None
        operand, transform = source if rowwise else source.t(), self.transform(name, rng_step)
        folds = spec.folds_scale and name not in self.products and not codes
        data, scale, of_tensor = quantize_by_reference(
            operand,
            spec,
            transform=transform,
            dequantize=folds,
            **self._arguments(name, tensor, spec, rng_step),
        )
        if codes and self.packs:
            data = aligned_codes(encode(data, FORMATS[spec.format]), FORMATS[spec.format].bits)
        else:
            data = data.to(DTYPES.get(spec.format, matrix.dtype) if codes else matrix.dtype)
        return quantized_direction(matrix, spec, rowwise, data, transform, None if folds else scale, of_tensor), None

    def empty(self, tensor: str, matrix: torch.Tensor, request: CastRequest) -> QuantizedTensor | None:
        """As ``GemmBackend``."""
        made: QuantizedTensor | None = None
        for name, columnwise in zip(SIDES[tensor], (False, True), strict=True):
            wanted = request.columnwise if columnwise else request.rowwise
            one = self._empty_direction(name, tensor, matrix, columnwise) if wanted else None
            if one is None or made is None:
                made = one or made
            else:
                made.columnwise_data, made.columnwise_scale = one.columnwise_data, one.columnwise_scale
                made.columnwise_tensor_scale = one.columnwise_tensor_scale
                made.columnwise_transform = one.columnwise_transform
        return made

    def _empty_direction(
        self, name: str, tensor: str, matrix: torch.Tensor, columnwise: bool
    ) -> QuantizedTensor | None:
        """One direction of ``empty``, for a GEMM; None for a view of the matrix."""
        transform, spec = self.transform(name, NO_DRAWS), self.specs[name, tensor]
        if spec is None and transform is None:
            return None
        rows, length = reversed(matrix.shape) if columnwise else matrix.shape
        block = 1 if transform is None else transform.block
        size, operand = (rows, -(-length // block) * block), matrix.t() if columnwise else matrix
        rule = None if spec is None else mx_rule(spec, None if transform is None else transform.spec)
        by_columns = fuses_mx(operand, rule, block) and operand.stride(1) != 1  # which the kernel writes transposed
        data = matrix.new_empty(size[::-1]).t() if by_columns else matrix.new_empty(size)
        scale = of_tensor = None
        if spec is not None and not (spec.folds_scale and name not in self.products):
            dtype = torch.float32 if spec.scale_format == "fp32" else torch.uint8
            scale = data.new_empty(_whole_blocks(data, block_sizes(spec, data)), dtype=dtype)
        if spec is not None and spec.tensor_scale is not None:
            of_tensor = data.new_empty(_whole_blocks(data, spec.outer_block or data.shape), dtype=torch.float32)
        return quantized_direction(matrix, spec, not columnwise, data, transform, scale, of_tensor)

    def _of_fprop(
        self, tensor: str, matrix: torch.Tensor, rng_step: RngStep, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        """fp32 values of fprop's operand. Beside a tensor scale they are dequantized from codes: one rounding less."""
        if isinstance(matrix, GatheredWeight):
            return matrix.fprop_values()
        if isinstance(matrix, FrozenWeight) and "fprop" not in matrix.specs.quantizes:
            return matrix.dequantized()
        matrix, spec = in_memory(matrix), self.specs["fprop", tensor]
        assert spec is not None
        plan = self.plans.of(tensor, matrix)
        scales_tensor = plan.rule is not None and plan.rule.target is not None
        if scales_tensor and spec.headroom == 1.0 and self.transforms.of("fprop") is None:
            known = self._known_amax(tensor, spec) if amax is None else amax
            values = plan.cast(matrix, rng_step, known, whole=True, out_dtype=torch.float32).rowwise_data
            assert values is not None
            return values
        request = CastRequest(True, False, update_amax=False, codes=spec.tensor_scale is not None)
        return self.quantize(tensor, matrix, rng_step, request)[0].dequantize()

    def from_codes(self, quantized: QuantizedTensor, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``GemmBackend``: values of the format's grid, power-of-two scales multiplied in."""
        (codes, scale), spec = quantized.rowwise(), quantized.spec
        assert spec is not None
        assert scale is not None
        in_data = spec.folds_scale and not self.products
        values = codes.to(torch.float32)
        if in_data:
            values = scale_blocks(values, as_numbers(scale, spec.scale_format), block_sizes(spec, codes))
        values = values.to(quantized.dtype)
        # contiguous, as ``quantize`` writes it: a CPU's GEMM may sum strided operands in another order
        kept = None if in_data or not codes.numel() else scale
        return values.t().contiguous() if columnwise else values, kept

    def primary_weight(self, gemm: str, weight: Fp8Weight) -> QuantizedTensor | None:
        """As ``GemmBackend``: the codes' values."""
        return weight.quantized(columnwise=gemm == "dgrad", codes=False, on_grid=gemm in self.products)

    def fuses_directions(self, tensor: str, matrix: torch.Tensor | CastPrologue, rng_step: RngStep) -> bool:
        """As ``GemmBackend``: where the MX kernel does."""
        if self.specs[SIDES[tensor][0], tensor] is None or not isinstance(matrix, torch.Tensor):
            return False
        return matrix.stride(1) == 1 and self.plans.of(tensor, matrix, columnwise=True).rule is not None

    def gemm(
        self,
        name: str,
        a: QuantizedTensor,
        b: QuantizedTensor,
        out_dtype: torch.dtype,
        *,
        accumulate_into: torch.Tensor | None = None,
        overwrite: bool = False,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``GemmBackend``; the bias is added after rounding, as Megatron-core's layers do."""
        left, right = ProductOperand.of(a, name == "wgrad"), ProductOperand.of(b, name != "fprop")
        y = gemm(
            left.data,
            right.data,
            a_scale=left.scale,
            b_scale=right.scale,
            a_block=left.block,
            b_block=right.block,
            alpha=_product_of(self.alpha[name], left.alpha, right.alpha),
            out_dtype=out_dtype,
            accumulate_into=accumulate_into,
            overwrite=overwrite,
            product=None if left.scale is None else self.products.get(name),  # an expert without tokens has no scales
        )
        return y if bias is None else add_bias(y, bias)

    def weight_amax(self, w_OI: torch.Tensor) -> torch.Tensor | None:
        """As ``GemmBackend``: for a tensor scale, where no transform comes between."""
        spec = self.specs["dgrad", "weight"]
        transformed = spec is not None and spec.source == "original" and self.transforms.of("dgrad") is not None
        found = None if transformed or isinstance(w_OI, Fp8Weight) else self._amaxes("weight", w_OI, NO_DRAWS)
        return None if found is None else found[0]

    def input_amaxes(self, x_TI: torch.Tensor, rng_step: RngStep) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As ``GemmBackend``: for tensor scales."""
        return self._amaxes("input", x_TI, rng_step)

    def _amaxes(self, tensor: str, matrix: torch.Tensor, rng_step: RngStep) -> tuple[torch.Tensor, torch.Tensor] | None:
        """fp32 [1] each: current amaxes of x or w, rowwise without a transform and columnwise, by one launch.

        An operand with fprop's values begins with fprop's cast, so its amax is fprop's. None for a matrix that the
        kernel does not read, or without tensor scales.
        """
        ways, reduce_amax, rounds = list[Direction](), None, False
        for name, rowwise in zip(SIDES[tensor], (True, False), strict=True):
            spec = self.specs[name, tensor]
            if spec is None or spec.tensor_scale is None or spec.scaling == "delayed":
                return None
            if spec.source == "fprop":
                break
            plan = self.plans.of(tensor, matrix, rowwise, not rowwise)
            way = plan.rows if rowwise else plan.columns
            if plan.rule is None or way is None or (rowwise and way.transform is not None):
                return None
            ways.append(way.at(self.transforms, rng_step, matrix.device))
            reduce_amax, rounds = plan.reduce_amax if rowwise else reduce_amax, plan.rule.rounds_transform
        by_row, by_column = ways[0], ways[1] if len(ways) > 1 else None
        found = load("amax").operand_amaxes(matrix, rows=by_row, columns=by_column, rounds_transform=rounds)
        of_rows, of_columns = (found if reduce_amax is None else reduce_amax(found)).view(2, 1).unbind()
        return of_rows, of_rows if by_column is None else of_columns

    def error_stats(self, name: str, tensor: str, matrix: torch.Tensor, rng_step: RngStep) -> torch.Tensor:
        """As ``GemmBackend``, from codes and scales that are not multiplied."""
        spec, transform = self.specs[name, tensor], self.transform(name, rng_step)
        assert spec is not None
        rounded = matrix if spec.source == "original" else self._of_fprop(tensor, matrix, rng_step)
        columnwise = name == SIDES[tensor][1]
        operand = matrix.t() if columnwise else matrix
        plan = self.plans.of(tensor, rounded, not columnwise, columnwise, codes=True)
        if plan.rule is not None and spec.scale_format == "e8m0":  # statistics take codes with these scales
            cast = plan.cast(rounded, rng_step, self._known_amax(tensor, spec), codes=True)
            data, scale, _ = cast.direction(not columnwise)
            signs = None if transform is None else transform.scaled_signs(matrix.device).sign()
            return error_stats(operand, QuantizedTensor(operand.shape, operand.dtype, spec, data, scale), signs=signs)
        rounded = rounded.t() if columnwise else rounded
        arguments = self._arguments(name, tensor, spec, rng_step)
        made = quantize_by_reference(rounded, spec, transform=transform, **arguments)
        signs = None if transform is None else transform.signs(matrix.device)
        return error_stats(operand, quantized_direction(operand, spec, True, made.data, None, *made[1:]), signs=signs)

    def transform(self, name: str, rng_step: RngStep) -> Transform | None:
        """The GEMM's Hadamard transform at an RNG step."""
        return self.transforms.at(name, rng_step)

    def reduction(self, name: str, tensor: str) -> Reduce | None:
        """Maximum over the ranks that share a current scale of an operand; None without such ranks."""
        spec = self.specs[name, tensor]
        return None if spec is None else self._amax.reduction(name, tensor, spec)

    def _known_amax(self, tensor: str, spec: QuantSpec) -> torch.Tensor | None:
        """fp32 amax of a tensor with delayed scaling, from its history; None under current scaling."""
        if spec.scaling != "delayed":
            return None
        history, slot = self._amax.histories[tensor]
        return history.in_effect[slot]

    def _arguments(self, name: str, tensor: str, spec: QuantSpec, rng_step: RngStep) -> dict[str, Any]:
        """Arguments of ``quantize_by_reference`` other than matrix, spec and transform."""
        return {
            "random": self.rounding[name, tensor].at(rng_step),
            "tensor_amax": self._known_amax(tensor, spec),
            "reduce_amax": self.reduction(name, tensor),
        }


def _whole_blocks(data: torch.Tensor, block: Sequence[int]) -> tuple[int, int]:
    return -(-data.shape[0] // block[0]), -(-data.shape[1] // block[1])


def _product_of(alpha: float, *of_tensors: torch.Tensor | None) -> float | torch.Tensor:
    """alpha times the scales of both tensors, in this order; of 1 without a launch."""
    found = [each for each in (alpha, *of_tensors) if each is not None]
    return reduce(mul, found[alpha == 1.0 and len(found) > 1 :])
