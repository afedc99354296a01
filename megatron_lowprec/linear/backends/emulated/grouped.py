"""Emulated GEMMs of a layer's experts on a GPU: one launch per operand and one per product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from megatron_lowprec.kernels.dispatch import load
from megatron_lowprec.kernels.matrices import Matrices
from megatron_lowprec.kernels.philox.key import Key
from megatron_lowprec.kernels.quantize.rule import MxRule
from megatron_lowprec.linear.backends.emulated.dense import EmulatedGemms
from megatron_lowprec.linear.backends.grouped_protocol import GroupedBackend, GroupOperand, GroupOperands
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.backends.resolved import LayerBackends
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.amax_history import cells_of, raise_newest
from megatron_lowprec.quantization.device_rng_step import device_rng_step
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.quantizer import mx_rule
from megatron_lowprec.quantization.random_stream import RandomStream, RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.transform import Transform
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, QuantSpec

_KNOWN_BLOCKS = (
    "kernels quantize blocks of 16, 32 or 64 entries with E8M0 or coded scales, no outer blocks, square ones to nearest"
)


class GroupedEmulatedGemms(GroupedBackend):
    """``GroupedBackend`` of emulated MX, or unquantized operands, in bf16.

    Its kernels take the experts' keys and addresses from a table.
    """

    def __init__(self, experts: Sequence[LayerBackends], name: str) -> None:
        super().__init__(experts, name)
        self._first = self._backend_of(experts[0])
        self._known_keys: dict[tuple[str, ...], tuple[Key, ...]] = {}

    def _backend_of(self, expert: LayerBackends) -> EmulatedGemms:
        return cast(EmulatedGemms, expert.built(self.name))

    @cached_property
    def _backends(self) -> list[EmulatedGemms]:  # a group is built in each forward pass, and may quantize nothing
        return [self._backend_of(expert) for expert in self._experts]

    def why_not(self, gemm: str, weight: torch.Tensor) -> str | None:
        """As ``GroupedBackend``."""
        if isinstance(weight, Fp8Weight) or weight.dtype != torch.bfloat16:
            return "kernels take bf16 weights"
        specs = {tensor: self._first.specs[gemm, tensor] for tensor in GEMM_OPERANDS[gemm]}
        transform, quantized = self._first.transforms.of(gemm), [spec is not None for spec in specs.values()]
        casts = [(gemm, spec) for spec in specs.values() if spec is not None]
        again = [tensor for tensor, spec in specs.items() if spec is not None and spec.source == "fprop"]
        casts += [("fprop", spec) for tensor in again if (spec := self._first.specs["fprop", tensor]) is not None]
        rules = [self._rule(*one) for one in casts]
        if None in rules:
            return _KNOWN_BLOCKS
        if gemm in self._first.products:
            return "the product emulates Hopper's accumulator"
        if (any(quantized) or transform is not None) and not all(quantized):
            return "an operand stays in the compute dtype"
        blocks = [spec.block for spec in specs.values() if spec is not None and spec.block is not None]
        if transform is not None and any(rows > 1 or transform[0].block % block for rows, block in blocks):
            return f"kernels transform whole blocks of one row, not {transform[0].block} entries"
        # whole groups along features; along tokens the kernels pad
        group = max(8, self._padding(gemm), *(rule.block for rule in rules if rule is not None))
        return f"sizes are no multiples of {group}" if any(size % group for size in weight.shape) else None

    def quantize(
        self, tensor: str, matrix: torch.Tensor, tokens: Sequence[int], rng_step: RngStep, request: CastRequest
    ) -> GroupOperands:
        """As ``GroupedBackend``; along tokens each expert's rows are padded."""
        found: list[GroupOperand | None] = []
        for wanted, gemm in zip((request.rowwise, request.columnwise), SIDES[tensor], strict=True):
            if not wanted:
                found.append(None)
            elif self._first.specs[gemm, tensor] is None:
                found.append(GroupOperand(matrix))
            else:
                sources = Matrices(matrix, tokens)
                found.append(self._quantized(gemm, tensor, sources, rng_step, request.update_amax))
        return GroupOperands(*found)

    def from_codes(self, codes: QuantizedTensor, tokens: Sequence[int]) -> GroupOperand:
        """As ``GroupedBackend``."""
        return GroupOperand(self._first.from_codes(codes, columnwise=False)[0])

    def weights(self, gemm: str, weights: Matrices, rng_step: RngStep, update_amax: bool) -> GroupOperand:
        """As ``GroupedBackend``."""
        if self._first.specs[gemm, "weight"] is None:
            return GroupOperand(weights if gemm == "fprop" else weights.transposed())
        data, of_tensors = self._quantized(gemm, "weight", weights, rng_step, update_amax)
        assert isinstance(data, torch.Tensor)
        stacked = data.view(len(weights), -1, weights.columns)
        return GroupOperand(Matrices(stacked if gemm == "fprop" else stacked.mT), of_tensors)

    def gemm(
        self, name: str, rows: GroupOperand, weights: GroupOperand, tokens: Sequence[int], out_dtype: torch.dtype
    ) -> torch.Tensor:
        """As ``GroupedBackend``."""
        product: torch.Tensor = load("grouped_gemm").grouped_gemm(
            rows.data, weights.data, tokens, alpha=self._alpha(name, rows, weights), out_dtype=out_dtype
        )
        return product

    def wgrad(
        self,
        dy: GroupOperand,
        x: GroupOperand,
        tokens: Sequence[int],
        totals: Sequence[torch.Tensor],
        overwrite: Sequence[bool],
    ) -> None:
        """As ``GroupedBackend``."""
        padding = self._padding("wgrad")
        rows = [-(-count // padding) * padding for count in tokens]
        alpha = self._alpha("wgrad", dy, x)
        load("grouped_gemm").grouped_wgrad_(dy.data, x.data, rows, totals, alpha=alpha, overwrite=overwrite)

    def _alpha(self, name: str, *operands: GroupOperand) -> float | torch.Tensor:
        """Factor of each expert's product: headroom divided out, times the scales of both tensors."""
        scales = [operand.scale for operand in operands if operand.scale is not None]
        return math.prod(scales, start=self._first.alpha[name])

    def _padding(self, name: str) -> int:
        """Rows to which an expert's operand along tokens is padded with zeros."""
        transform = self._first.transforms.of(name)
        return 1 if transform is None else transform[0].block

    def _quantized(
        self, name: str, tensor: str, sources: Matrices, rng_step: RngStep, update_amax: bool
    ) -> GroupOperand:
        """Operand of a GEMM for all experts, [rows, N]; amaxes are recorded under delayed scaling."""
        spec, dtype = self._first.specs[name, tensor], sources.dtype
        assert spec is not None
        if spec.scaling == "delayed" and update_amax:
            rule = self._rule(name, spec)
            amax = load("grouped_quantize").amaxes_of_groups(sources, rule, columnwise=False)
            raise_newest(self._histories(tensor), amax)
        if spec.source == "fprop":
            of_fprop = self._first.specs["fprop", tensor]
            assert of_fprop is not None
            values, _ = self._cast("fprop", tensor, sources, rng_step, whole=True, out_dtype=torch.float32)
            values = values if of_fprop.headroom == 1.0 else values / of_fprop.headroom
            sources = Matrices(values, sources.rows)
        return GroupOperand(*self._cast(name, tensor, sources, rng_step, out_dtype=dtype))

    def _rule(self, name: str, spec: QuantSpec) -> MxRule | None:
        transform = self._first.transforms.of(name)
        return mx_rule(spec, None if transform is None else transform[0])

    def _cast(
        self, name: str, tensor: str, sources: Matrices, rng_step: RngStep, **outputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``quantize_mx_groups`` by the spec of an operand."""
        spec, transform = self._first.specs[name, tensor], self._first.transforms.of(name)
        assert spec is not None
        rule, op, device = self._rule(name, spec), load("grouped_quantize"), sources.device
        assert rule is not None
        on_device, signs = device_rng_step(rng_step, device), None
        if transform is not None:
            group = transform[0].block
            if transform[0].signs == "random":
                keys = self._keys("signs", name, stream_of=lambda backend: backend.transforms.stream(name))
                signs = op.scaled_signs_of_groups(keys, on_device, group)
            else:
                signs = Transform(transform[0]).scaled_signs(device).expand(len(sources), group).contiguous()
        columnwise = SIDES[tensor][1] == name
        stream = self._first.rounding[name, tensor]
        spans = (stream.row_span, stream.column_span)
        amax = None
        if rule.target is not None and spec.scaling == "delayed":
            amax, _ = cells_of(self._histories(tensor))
            amax = amax.clone() if isinstance(amax, torch.Tensor) else torch.cat(amax)
        elif rule.target is not None:
            amax = op.amaxes_of_groups(sources, rule, columnwise=columnwise, signs=signs)
            reduce_amax = self._first.reduction(name, tensor)
            amax = amax if reduce_amax is None else reduce_amax(amax)
        scale_keys = None
        if spec.scale.rounding == "stochastic":
            scale_keys = self._keys(
                "scales", name, tensor, stream_of=lambda backend: backend.rounding[name, tensor].of_scales()
            )
        found: tuple[torch.Tensor, torch.Tensor | None] = op.quantize_mx_groups(
            sources,
            rule,
            columnwise=columnwise,
            keys=self._keys("values", name, tensor, stream_of=lambda backend: backend.rounding[name, tensor]),
            scale_keys=scale_keys,
            signs=signs,
            amax=amax,
            rng_step=on_device,
            spans=spans[::-1] if columnwise else spans,
            **outputs,
        )
        return found

    def _keys(self, *draws: str, stream_of: Callable[[EmulatedGemms], RandomStream]) -> tuple[Key, ...]:
        """Each expert's key of some draws, found once."""
        if draws not in self._known_keys:
            self._known_keys[draws] = tuple(Key.of(stream_of(backend).key) for backend in self._backends)
        return self._known_keys[draws]
