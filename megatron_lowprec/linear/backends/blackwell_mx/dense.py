"""GEMMs on Blackwell's block-scaled tensor cores: codes of the emulated backend's quantizers, in the units' layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.dispatch import add_bias, arch_of, fuses_mx, load
from megatron_lowprec.kernels.mx_gemm import native, reference
from megatron_lowprec.kernels.mx_gemm.operand import (
    ALIGNED,
    MxOperand,
    aligned_codes,
    bytes_of_tiles,
)
from megatron_lowprec.kernels.quantize.elements import unpacked
from megatron_lowprec.kernels.quantize.reference import encode
from megatron_lowprec.linear.backends.blackwell_mx.operands import CODES, decoded, in_tiles, operand_of, with_tiles
from megatron_lowprec.linear.backends.blackwell_mx.sampled import operand_check, product_check, sampled_product
from megatron_lowprec.linear.backends.blackwell_mx.start_check import (
    CHECKS,
    Check,
    Key,
)
from megatron_lowprec.linear.backends.blackwell_mx.why_not import WITH_BLOCK_SCALES, product_of
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.backends.hopper_fp8.why_not import operands_of
from megatron_lowprec.linear.backends.protocol import CastRequest, KnownAmax, LayerContext
from megatron_lowprec.linear.layer_tensors import in_memory
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import mx_rule
from megatron_lowprec.quantization.random_stream import NO_DRAWS, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor, quantized_direction
from megatron_lowprec.recipe.schema import QuantSpec

_Sides = tuple[tuple[QuantizedTensor, bool], tuple[QuantizedTensor, bool]]
"""Two operands, each with whether its columnwise data are multiplied."""


class _ByReference(EmulatedGemms):
    """Casts to codes by the quantizer's reference, on a GPU as well."""

    packs, by_kernel = True, False


class BlackwellMxGemms(EmulatedGemms):
    """``GemmBackend`` on block-scaled tensor cores; on a CPU it multiplies by the model that reads their bytes.

    Operands have the codes and scales of the emulated backend's, from the same kernels, draws and amaxes.

    Attributes:
        emulated: the same layer's emulated backend.
    """

    packs = True

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        self.emulated = EmulatedGemms(context)
        self._by_reference = _ByReference(context)
        self._gemms = context.recipe.gemms

    def quantize(
        self,
        tensor: str,
        matrix: torch.Tensor | CastPrologue,
        rng_step: RngStep,
        request: CastRequest,
        amax: KnownAmax | None = None,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """As ``GemmBackend``; codes for other backends are those of the emulated one.

        The layout is always that of ``empty``, on which compiled graphs rely. After an operand failed its check, the
        reference quantizes, but not where ranks share amaxes: each would have to reduce them as often as the others.
        """
        if request.codes:
            return self.emulated.quantize(tensor, matrix, rng_step, request, amax)
        if CHECKS.operand_fault and not self._reduces(tensor):
            return self._quantized_by_reference(tensor, matrix, rng_step, request), None
        if (square := self._square(tensor, matrix, rng_step, request)) is not None:
            made, sums = square, None
        else:
            made, sums = super().quantize(tensor, matrix, rng_step, request._replace(codes=True), amax)
        made = with_tiles(made)
        if CHECKS.applies(in_memory(matrix).device):
            return self._checked_operand(tensor, matrix, rng_step, request, made), sums
        return made, sums

    def empty(self, tensor: str, matrix: torch.Tensor, request: CastRequest) -> QuantizedTensor | None:
        """As ``quantize``, with data and scales not filled; sizes may be symbolic."""
        made = super().empty(tensor, matrix, request)
        assert made is not None
        made.scale_layout = "tiles_128x4"
        return made

    def _empty_direction(self, name: str, tensor: str, matrix: torch.Tensor, columnwise: bool) -> QuantizedTensor:
        spec, transform = self.specs[name, tensor], self.transform(name, NO_DRAWS)
        assert spec is not None
        assert spec.block is not None
        rows, length = reversed(matrix.shape) if columnwise else matrix.shape
        whole = 1 if transform is None else transform.block
        columns = -(-length // whole) * whole
        width = -(-columns // ALIGNED) * ALIGNED * FORMATS[spec.format].bits // 8
        codes = matrix.new_empty((rows, width), dtype=torch.uint8).view(CODES[spec.format])
        tiles = matrix.new_empty((bytes_of_tiles(rows, -(-columns // spec.block[1])),), dtype=torch.uint8)
        above = None if spec.tensor_scale is None else matrix.new_empty((1, 1), dtype=torch.float32)
        return quantized_direction(matrix, spec, not columnwise, codes, transform, tiles, above)

    def primary_weight(self, gemm: str, weight: Fp8Weight) -> Any:
        """As ``GemmBackend``: its codes in the units' layout; None if the weight has none for the GEMM."""
        made: Any = weight.quantized(columnwise=gemm == "dgrad", codes=False, on_grid=True)
        if made is None:
            return None
        fmt = made.format
        if made.rowwise_data is not None:
            made.rowwise_data = aligned_codes(encode(made.rowwise_data, fmt), fmt.bits)
        if made.columnwise_data is not None:
            made.columnwise_data = aligned_codes(encode(made.columnwise_data, fmt), fmt.bits)
        return with_tiles(made)

    def from_codes(self, quantized: QuantizedTensor, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``GemmBackend``: the codes in the units' layout."""
        assert not columnwise, "blocks of one row have no transpose"
        data, scale = quantized.rowwise()
        fmt = quantized.format
        codes = data.view(torch.uint8) if data.element_size() == 1 else encode(data, fmt)
        return in_tiles(quantized.spec, aligned_codes(codes, fmt.bits), scale, quantized.shape[0])

    def fuses_directions(self, tensor: str, matrix: torch.Tensor | CastPrologue, rng_step: RngStep) -> bool:
        """As ``GemmBackend``: where the MX kernel does, square blocks by ``_square``."""
        spec = self.specs[SIDES[tensor][0], tensor]
        together = super().fuses_directions(tensor, matrix, rng_step)
        return together and spec is not None and (spec.block is None or spec.block[0] == 1 or _as_square(spec))

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
        """As ``GemmBackend``; the bias is added after rounding, as the emulated backend does."""
        options: dict[str, Any] = {
            "alpha": self.alpha[name],
            "out_dtype": out_dtype,
            "accumulate_into": accumulate_into,
            "overwrite": overwrite,
        }
        sides = (a, name == "wgrad"), (b, name != "fprop")
        if CHECKS.fault:  # casts keep their layout
            y = self._emulated(name, sides, options)
        else:
            left, right = (operand_of(*side) for side in sides)
            product = self._product(name, left.codes.device)
            # the number of tokens varies: rows of fprop and dgrad, terms of wgrad
            sizes = left.codes.shape[0], right.codes.shape[0], left.columns
            tokens = 2 if name == "wgrad" else 0
            sized = (size.bit_length() if at == tokens else size for at, size in enumerate(sizes))
            # the specs tell which product runs, and what is multiplied to its sum
            key = (name, *sized, self._gemms[name], self.alpha[name], out_dtype, accumulate_into is None, overwrite)
            if CHECKS.is_due(key, left.codes.device):
                y = self._checked_product(name, key, sides, (left, right), product, options)
            else:
                y = product(left, right, **options)
        return y if bias is None else add_bias(y, bias)

    def _checked_product(
        self,
        name: str,
        key: Key,
        sides: _Sides,
        operands: tuple[MxOperand, MxOperand],
        product: Callable[..., torch.Tensor],
        options: dict[str, Any],
    ) -> torch.Tensor:
        """The native product, of which tiles are compared with the model's; the emulated one if they differ."""
        total, (left, right) = options["accumulate_into"], operands
        before = None if total is None or options["overwrite"] else total.clone()  # a wrong product may spoil it
        what = (
            f"{name} [{left.codes.shape[0]}, {right.codes.shape[0]}] over {left.columns} of {left.format.upper()} and "
            f"{right.format.upper()} on {arch_of(left.codes.device)}"
        )

        def compare(got: torch.Tensor) -> Check:
            added = None if before is None else sampled_product(before)
            return product_check(what, got, operands, options["alpha"], added)

        got = CHECKS.product(key, what, lambda: product(left, right, **options), compare)
        if got is not None:
            return got
        if before is not None:
            total.copy_(before)
        return self._emulated(name, sides, options)

    def _square(
        self, tensor: str, matrix: torch.Tensor | CastPrologue, rng_step: RngStep, request: CastRequest
    ) -> QuantizedTensor | None:
        """Codes of square blocks by the MX kernel, which writes them along columns; None where it does not take them.

        Scales are repeated for each row. Rowwise codes are the transpose of columnwise ones.
        """
        source, name = in_memory(matrix), SIDES[tensor][not request.rowwise]
        spec = self.specs[name, tensor]
        if spec is None or not _as_square(spec) or source.stride(1) != 1 or self.transform(name, rng_step) is not None:
            return None
        rule = mx_rule(spec)
        if not fuses_mx(source, rule):
            return None
        assert rule is not None
        plan = self.plans.of(tensor, source, request.rowwise, not request.rowwise)
        way = plan.rows or plan.columns
        assert way is not None
        # errors are summed in the order of rows
        way = way._replace(lanes_first=request.rowwise and not rule.shares_directions)
        plan = plan._replace(rule=rule, reads_transpose=False, rows=None, columns=way)
        codes, scale, above = plan.cast(source, rng_step, codes=True).direction(False)
        assert codes is not None
        assert scale is not None
        made = QuantizedTensor(source.shape, source.dtype, spec)
        if request.columnwise:
            made.columnwise_data, made.columnwise_scale, made.columnwise_tensor_scale = codes, scale, above
        if request.rowwise:
            bits = FORMATS[spec.format].bits
            entries = (unpacked(codes) if bits == 4 else codes)[:, : source.shape[0]].t()
            made.rowwise_data, made.rowwise_tensor_scale = aligned_codes(entries, bits), above
            made.rowwise_scale = scale[:: rule.block_rows].t()
        return made

    def _checked_operand(
        self,
        tensor: str,
        matrix: torch.Tensor | CastPrologue,
        rng_step: RngStep,
        request: CastRequest,
        made: QuantizedTensor,
    ) -> QuantizedTensor:
        """The operand, if each direction has the bits of the quantizer's reference; else that of the reference.

        A kind of operand is checked once a size. Where ranks share the tensor's amax only the frequencies of stochastic
        rounding are, and the operand stays: a second reduction would wait for ranks that do not come here.
        """
        source, holds = in_memory(matrix), True
        for name, columnwise, wanted in zip(
            SIDES[tensor], (False, True), (request.rowwise, request.columnwise), strict=True
        ):
            spec = self.specs[name, tensor]
            if not wanted or spec is None or spec.source != "original":
                continue
            sizes = (size.bit_length() for size in source.shape)
            transform = self.transform(name, rng_step)
            key = (name, tensor, *sizes, spec, None if transform is None else transform.spec)
            # an operand that is quantized again follows from numbers that are not here
            if CHECKS.is_due(key, source.device):
                last = source.t() if columnwise else source
                check = self._check_operand(name, tensor, last, spec, rng_step, operand_of(made, columnwise))
                holds = CHECKS.record(key, check, of_operand=True) and holds
        if holds or self._reduces(tensor):
            return made
        return self._quantized_by_reference(tensor, matrix, rng_step, request._replace(update_amax=False))

    def _reduces(self, tensor: str) -> bool:
        return any(self.reduction(name, tensor) is not None for name in SIDES[tensor])

    def _quantized_by_reference(
        self, tensor: str, matrix: torch.Tensor | CastPrologue, rng_step: RngStep, request: CastRequest
    ) -> QuantizedTensor:
        """As ``quantize``, one direction after the other."""
        made: QuantizedTensor | None = None
        if request.rowwise:
            rowwise = request._replace(columnwise=False, codes=True)
            made = self._by_reference.quantize(tensor, matrix, rng_step, rowwise)[0]
        if request.columnwise:
            updates = request.update_amax and made is None
            columnwise = request._replace(rowwise=False, codes=True, update_amax=updates)
            one = self._by_reference.quantize(tensor, matrix, rng_step, columnwise)[0]
            if made is not None:
                one.rowwise_data, one.rowwise_scale = made.rowwise()
                one.rowwise_tensor_scale, one.rowwise_transform = made.rowwise_tensor_scale, made.rowwise_transform
            made = one
        assert made is not None
        return with_tiles(made)

    def _check_operand(
        self, name: str, tensor: str, last: torch.Tensor, spec: QuantSpec, rng_step: RngStep, operand: MxOperand
    ) -> Check:
        return operand_check(
            f"{name}'s {tensor} {tuple(last.shape)}",
            operand,
            last,
            spec,
            self.rounding[name, tensor].at(rng_step),
            self.transform(name, rng_step),
            self._known_amax(tensor, spec),
            shares_amax=self.reduction(name, tensor) is not None,
        )

    def _emulated(self, name: str, sides: _Sides, options: dict[str, Any]) -> torch.Tensor:
        """The emulated product of operands of either backend."""
        a, b = (decoded(*side) for side in sides)
        rest = {option: value for option, value in options.items() if option not in ("alpha", "out_dtype")}
        return self.emulated.gemm(name, a, b, options["out_dtype"], **rest)

    def _product(self, name: str, device: torch.device) -> Callable[..., torch.Tensor]:
        if device.type == "cpu":
            return reference.mx_gemm
        arch, gemm = arch_of(device), self._gemms[name]
        if product_of(name, gemm, arch) == "scaled_mm":
            return native.mx_gemm
        product: Callable[..., torch.Tensor] = load("mx_gemm").mx_gemm
        # elsewhere dot_scaled multiplies bf16 values, but not under scales of 16 entries
        folds = arch not in WITH_BLOCK_SCALES and operands_of(name, gemm)[0].scale_format != "e8m0"
        return partial(product, folds=True) if folds else product


def _as_square(spec: QuantSpec) -> bool:
    """Whether ``_square`` takes an operand, but for its matrix."""
    square = spec.block is not None and spec.block[0] == spec.block[1] > 1
    return square and spec.source == "original" and spec.scaling == "current"
