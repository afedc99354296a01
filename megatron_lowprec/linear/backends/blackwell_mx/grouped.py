"""Block-scaled GEMMs of a layer's experts by torch's grouped scaled product, on compute capability 10.

It returns bf16 only, so that wgrad, which adds to fp32, multiplies one expert after the other. On Hopper torch's
product faults and takes the CUDA context with it: ``why_not`` reads the GPU's own name, also where a test pretends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from megatron_lowprec.kernels.dispatch import arch_of
from megatron_lowprec.kernels.matrices import Matrices
from megatron_lowprec.kernels.mx_gemm import native, reference
from megatron_lowprec.kernels.mx_gemm.operand import MxOperand, of_experts
from megatron_lowprec.linear.backends.blackwell_mx.dense import BlackwellMxGemms
from megatron_lowprec.linear.backends.blackwell_mx.operands import operand_of
from megatron_lowprec.linear.backends.blackwell_mx.sampled import product_check
from megatron_lowprec.linear.backends.blackwell_mx.start_check import CHECKS, Check
from megatron_lowprec.linear.backends.blackwell_mx.why_not import WITH_SCALED_MM, product_of
from megatron_lowprec.linear.backends.grouped_protocol import GroupedBackend, GroupOperand, GroupOperands
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.quantization.token_rows import split_rows


class GroupedBlackwellMxGemms(GroupedBackend):
    """``GroupedBackend`` of MXFP8 in E4M3 and of NVFP4; each expert is cast by its own backend.

    Rowwise operands and weights are an ``MxOperand`` of all experts with tokens, columnwise ones a quantized tensor
    each.
    """

    @cached_property
    def _backends(self) -> list[BlackwellMxGemms]:
        return [cast(BlackwellMxGemms, expert.built(self.name)) for expert in self._experts]

    def why_not(self, gemm: str, weight: torch.Tensor) -> str | None:
        """As ``GroupedBackend``."""
        arch = arch_of(weight.device)
        if arch not in WITH_SCALED_MM:
            return f"torch's grouped product of blocks needs one of {', '.join(WITH_SCALED_MM)}, this is {arch}"
        if CHECKS.fault or CHECKS.experts_fault:
            return "products failed their check"
        if isinstance(weight, Fp8Weight):
            return "weights that are stored as codes are multiplied one after the other"
        if gemm != "wgrad" and product_of(gemm, self._recipe.gemms[gemm], arch) != "scaled_mm":
            return "torch's grouped product takes MXFP8 of E4M3 without headroom, and NVFP4"
        return None

    def fuses_directions(self, tensor: str) -> bool:
        """As ``GroupedBackend``: where an expert's own cast may."""
        return self._experts[0].resolved.one_cast[tensor] is not None

    def quantize(
        self, tensor: str, matrix: torch.Tensor, tokens: Sequence[int], rng_step: RngStep, request: CastRequest
    ) -> GroupOperands:
        """As ``GroupedBackend``."""
        by_row, by_column = list[QuantizedTensor | None](), list[QuantizedTensor | None]()
        for backend, part in zip(self._backends, matrix.split(list(tokens)), strict=True):
            requests = [request]
            if request.rowwise and request.columnwise and not backend.fuses_directions(tensor, part, rng_step):
                requests = [request._replace(columnwise=False), request._replace(rowwise=False, update_amax=False)]
            made = [backend.quantize(tensor, part, rng_step, one)[0] if len(part) else None for one in requests]
            by_row.append(made[0])
            by_column.append(made[-1])
        rowwise = _rows(by_row) if request.rowwise else None
        return GroupOperands(rowwise, GroupOperand(by_column) if request.columnwise else None)

    def from_codes(self, codes: QuantizedTensor, tokens: Sequence[int]) -> GroupOperand:
        """As ``GroupedBackend``."""
        parts = zip(self._backends, split_rows(codes, list(tokens)), strict=True)
        return _rows(
            [
                QuantizedTensor(part.shape, part.dtype, part.spec, *backend.from_codes(part, columnwise=False))
                if part.shape[0]
                else None
                for backend, part in parts
            ]
        )

    def weights(self, gemm: str, weights: Matrices, rng_step: RngStep, update_amax: bool) -> GroupOperand:
        """As ``GroupedBackend``."""
        request = CastRequest(gemm == "fprop", gemm == "dgrad", update_amax)
        made = [
            backend.quantize("weight", weight, rng_step, request)[0]
            for backend, weight in zip(self._backends, weights, strict=True)
        ]
        stacked = of_experts([operand_of(one, request.columnwise) for one in made])
        return GroupOperand(stacked._replace(codes=stacked.codes.unflatten(0, (len(made), -1))))

    def gemm(
        self, name: str, rows: GroupOperand, weights: GroupOperand, tokens: Sequence[int], out_dtype: torch.dtype
    ) -> torch.Tensor:
        """As ``GroupedBackend``; the first product of each kind is compared with the model's."""
        a, b = rows.data, weights.data
        assert isinstance(a, MxOperand)
        assert isinstance(b, MxOperand)
        device, alpha = a.codes.device, self._backends[0].alpha[name]
        ends = torch.tensor(tokens, device="cpu").cumsum(0).to(torch.int32).to(device)
        product = _product(device)
        spec = self._recipe.gemms[name]
        sizes = a.codes.shape[0].bit_length(), 0 in tokens, *b.codes.shape
        key = ("experts", name, *sizes, spec, alpha, out_dtype)
        options: dict[str, Any] = {"alpha": alpha, "out_dtype": out_dtype}
        if not CHECKS.is_due(key, device):
            return product(a, b, ends, **options)
        what = f"{name} of {len(tokens)} experts {tuple(b.codes.shape[1:])} of {a.format.upper()} on {arch_of(device)}"

        def compare(got: torch.Tensor) -> Check:
            parts = zip(got.split(list(tokens)), reference.experts(a, b, ends), strict=True)
            found = [product_check(what, part, operands, alpha, None) for part, operands in parts if len(part)]
            return max(found, key=lambda one: (bool(one.fault), one.error))

        got = CHECKS.product(key, what, lambda: product(a, b, ends, **options), compare, of_experts=True)
        return reference.mx_grouped_gemm(a, b, ends, **options) if got is None else got

    def wgrad(
        self,
        dy: GroupOperand,
        x: GroupOperand,
        tokens: Sequence[int],
        totals: Sequence[torch.Tensor],
        overwrite: Sequence[bool],
    ) -> None:
        """As ``GroupedBackend``, one expert after the other."""
        for backend, left, right, total, writes in zip(self._backends, dy.data, x.data, totals, overwrite, strict=True):
            if left is None:
                if writes:
                    total.zero_()
            elif total.dtype == torch.float32:
                backend.gemm("wgrad", left, right, total.dtype, accumulate_into=total, overwrite=writes)
            else:  # a new gradient in the dtype of the weight
                total.copy_(backend.gemm("wgrad", left, right, total.dtype))


def _product(device: torch.device) -> Callable[..., torch.Tensor]:
    return reference.mx_grouped_gemm if device.type == "cpu" else native.mx_grouped_gemm


def _rows(made: Sequence[QuantizedTensor | None]) -> GroupOperand:
    """Rowwise operand of all experts; those without tokens have no rows, and 1 as the tensor's scale."""
    operands = [None if one is None else operand_of(one, False) for one in made]
    some = next(one for one in operands if one is not None)
    above = None if some.tensor_scale is None else torch.ones_like(some.tensor_scale)
    empty = some._replace(codes=some.codes[:0], scales=some.scales[:0], tensor_scale=above)
    return GroupOperand(of_experts([empty if one is None else one for one in operands]))
