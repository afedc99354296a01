"""GEMMs on FP8 tensor cores: fused casts and torch's scaled GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.nn.functional import pad

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.kernels.cast_fp8.prologue import CastPrologue
from megatron_lowprec.kernels.cast_fp8.rule import Fp8Rule
from megatron_lowprec.kernels.dispatch import load, transpose_codes
from megatron_lowprec.kernels.gemm.native import ROW_MULTIPLE, SCALE_ALIGNMENT, scaled_gemm
from megatron_lowprec.linear.backends.protocol import (
    CastRequest,
    GemmBackend,
    KnownAmax,
    LayerContext,
    gemm_operands,
)
from megatron_lowprec.linear.layer_tensors import CastFusion, in_memory
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.primary_weight import Fp8Weight, native_scale
from megatron_lowprec.quantization.quantizer import Reduce
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, QuantSpec


class HopperFp8Gemms(GemmBackend):
    """``GemmBackend`` on FP8 tensor cores; its gemm adds a bias before it rounds to bf16.

    Attributes:
        fast_accumulation: by GEMM, whether sums stay in the tensor cores' accumulator.
        operand_specs: (tensor, columnwise) -> its spec.
        reductions: (tensor, columnwise) -> amax reduction over ranks that share its current scale, or None.
    """

    fuses_producer = True
    one_cast = frozenset(SIDES)
    caches_primary = frozenset({"dgrad"})  # a transposed copy; fprop's operand aliases the codes

    def __init__(self, context: LayerContext) -> None:
        recipe, layer_amax = context.recipe, context.layer_amax
        self._amax = layer_amax
        self.fast_accumulation = {name: gemm.fast_accumulation for name, gemm in recipe.gemms.items()}
        self.operand_specs: dict[tuple[str, bool], QuantSpec] = {}
        self._rules: dict[tuple[str, bool], Fp8Rule] = {}
        self.reductions: dict[tuple[str, bool], Reduce | None] = {}
        for tensor, gemms in SIDES.items():
            for columnwise, gemm in enumerate(gemms):
                spec = getattr(recipe.gemms[gemm], tensor)
                if spec is not None:
                    self.operand_specs[tensor, bool(columnwise)] = spec
                    self._rules[tensor, bool(columnwise)] = rule_of(spec)
                    self.reductions[tensor, bool(columnwise)] = layer_amax.reduction(gemm, tensor, spec)
        of_weight = [self.operand_specs.get(("weight", columnwise)) for columnwise in (False, True)]
        self.one_weight_amax = of_weight[0] == of_weight[1] and _current(of_weight[0])

    def quantize(
        self,
        tensor: str,
        matrix: torch.Tensor | CastPrologue,
        rng_step: RngStep,
        request: CastRequest,
        amax: KnownAmax | None = None,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """As ``GemmBackend``, for bf16 on a GPU; without stochastic rounding.

        A computed prologue requires granularity "tensor" and a known scale; a split one excludes granularity "row".
        """
        rowwise, columnwise, update_amax, sums, *_ = request
        spec, casts = self.operand_specs[tensor, not rowwise], load("cast_fp8")
        observed = scale_amax = None
        if isinstance(matrix, torch.Tensor):
            matrix = in_memory(matrix)
            matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
        if spec.scaling == "delayed":
            history, slot = self._amax.histories[tensor]
            scale_amax, newest = history.cells(slot)
            observed = newest if update_amax and self._amax.records else None
        elif spec.granularity == "tensor":
            scale_amax = casts.amax_of(matrix, vectors=False) if amax is None else amax.value
            if amax is None or not amax.reduced:
                # both directions share the tensor's ranks
                reduce = self.reductions[tensor, not rowwise]
                scale_amax = scale_amax if reduce is None else reduce(scale_amax)
        elif spec.granularity == "row":
            scale_amax = casts.amax_of(matrix, vectors=True)
            for part, direction in zip(scale_amax.split(matrix.shape), (False, True), strict=True):
                reduce = self.reductions.get((tensor, direction))
                if reduce is not None:
                    part.copy_(reduce(part))
        cast = casts.cast_fp8(
            matrix,
            self._rules[tensor, not rowwise],
            rowwise=rowwise,
            columnwise=columnwise,
            amax=scale_amax,
            observed=observed,
            sums=sums,
        )
        return QuantizedTensor(matrix.shape, matrix.dtype, spec, *cast[:4]), cast.sums

    def cast(
        self,
        tensor: str,
        matrix: torch.Tensor,
        rng_step: RngStep,
        request: CastRequest,
        amax: KnownAmax | None = None,
    ) -> Sequence[torch.Tensor | None]:
        """As ``GemmBackend``: of one launch, which gives each tensor memory of its own."""
        made, sums = self.quantize(tensor, matrix, rng_step, request, amax)
        return made.rowwise_data, made.rowwise_scale, made.columnwise_data, made.columnwise_scale, sums

    def empty(self, tensor: str, matrix: torch.Tensor, request: CastRequest) -> QuantizedTensor:
        """As ``GemmBackend``."""
        rowwise, columnwise, *_ = request
        spec, rule = self.operand_specs[tensor, not rowwise], self._rules[tensor, not rowwise]
        made = rule.empty(matrix.shape, matrix.device, rowwise=rowwise, columnwise=columnwise)
        return QuantizedTensor(matrix.shape, matrix.dtype, spec, *made[:4])

    def from_codes(self, quantized: QuantizedTensor, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``GemmBackend``: the codes, or their transpose with tokens zero-padded to the GEMM's multiple."""
        codes, scale = quantized.rowwise()
        if not columnwise:
            assert quantized.spec is not None
            if quantized.spec.granularity == "1x128":
                return codes_of_blocks(codes, scale)
            return codes, None if scale is None else _aligned(native_scale(scale, quantized.spec))
        return transpose_codes(codes, ROW_MULTIPLE), scale

    def primary_weight(self, gemm: str, weight: Fp8Weight) -> QuantizedTensor | None:
        """As ``GemmBackend``: the codes."""
        return weight.quantized(columnwise=gemm == "dgrad", codes=True)

    def supported_fusion(self, tensor: str) -> CastFusion:
        """As ``GemmBackend``: "source" under a known scale of the whole tensor, "amax" under a current one."""
        spec = self.operand_specs[tensor, False]
        if spec.granularity != "tensor":
            return None
        return "source" if spec.scaling == "delayed" else "amax"

    def accepts_split_input(self, tensor: str) -> bool:
        """As ``GemmBackend``."""
        return self.operand_specs[tensor, False].granularity != "row"

    def planned_rule(self, tensor: str, request: CastRequest) -> Fp8Rule | None:
        """As ``GemmBackend``: under scales of the pass itself, but of blocks.

        Inductor lets the compiler contract multiply-adds, of which scales of blocks have some.
        """
        direction = tensor, not request.rowwise
        spec = self.operand_specs[direction]
        return None if spec.scaling == "delayed" or spec.block is not None else self._rules[direction]

    def traces_gemm(self, name: str) -> bool:
        """As ``GemmBackend``; Inductor finds out the blocks of scales by their sizes, which are padded here."""
        return all(self.operand_specs[tensor, SIDES[tensor][1] == name].block is None for tensor in GEMM_OPERANDS[name])

    def weight_amax(self, w_OI: torch.Tensor) -> torch.Tensor | None:
        """As ``GemmBackend``."""
        if not self.one_weight_amax:
            return None
        amax: torch.Tensor = load("cast_fp8").amax_of(w_OI if w_OI.stride(1) == 1 else w_OI.contiguous(), vectors=False)
        return amax if self._amax.reduce is None else self._amax.reduce(amax)

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
        """As ``GemmBackend``."""
        a_data, a_scale, b_data, b_scale = gemm_operands(name, a, b)
        assert a_scale is not None
        assert b_scale is not None
        assert a.spec is not None
        assert b.spec is not None
        product = scaled_gemm(
            a_data,
            b_data,
            a_scale=a_scale,
            b_scale=b_scale,
            a_granularity=a.spec.granularity,
            b_granularity=b.spec.granularity,
            out_dtype=out_dtype,
            fast_accumulation=self.fast_accumulation[name],
            bias=bias,
            accumulate_into=accumulate_into,
            overwrite=overwrite,
        )
        rows = a.shape[1] if name == "wgrad" else a.shape[0]
        return product if product.shape[0] == rows else product[:rows]  # 1x128 data are padded


def _current(spec: QuantSpec | None) -> bool:
    """Whether a tensor has one scale, by its own amax."""
    return spec is not None and (spec.granularity, spec.scaling) == ("tensor", "current")


def codes_of_blocks(codes: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, K] and scales [T, K / 128] of 1x128 blocks as ``cast_fp8`` writes them: zero-padded, K outermost."""
    assert scale is not None
    height = (0, 0, 0, -len(codes) % 128)
    padded = pad(codes.view(torch.uint8), height).view(codes.dtype) if height[3] else codes
    return padded, _aligned(pad(scale, height).t().contiguous()).t()


def _aligned(scale: torch.Tensor) -> torch.Tensor:
    """Scales at an address that cuBLAS takes: those of one expert may begin between two."""
    return scale if scale.data_ptr() % SCALE_ALIGNMENT == 0 else scale.clone()


@lru_cache(maxsize=64)
def rule_of(spec: QuantSpec) -> Fp8Rule:
    """The ``Fp8Rule`` of a spec, for the casts; one object for equal specs, since it caches kernels."""
    return Fp8Rule(FORMATS[spec.format], spec.granularity, spec.scale_rule, spec.amax_floor, spec.margin)
