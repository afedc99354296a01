"""Quantization error of each operand of each GEMM in one step, over all ranks with shards or replicas of it.

In a training step, the first microbatch's operands are quantized a second time to measure the error. A step without the
probe has no overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.linear.layer_tensors import GradOutput, SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, SIDES, LinearId
from megatron_lowprec.mcore.debug.instrumented import InstrumentedGemms, instrumented
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.quantization.error_stats import COUNTS, QuantizationError
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import RngStep

_ORDER = {operand: number for number, operand in enumerate(DIMS)}


class OperandId(NamedTuple):
    """Identifies an operand of a model by global numbers; sorts by layer, name, expert and GEMM."""

    layer: int
    name: str
    expert: int
    order: int
    gemm: str
    operand: str
    format: str

    @property
    def linear(self) -> str:
        """Name as in ``--rerun-in-bf16``, with the expert."""
        return LinearId(self.layer, self.name, self.expert).path


class OperandProbe:
    """Context manager that measures the operands of this rank's chunks in a training step's first microbatch.

    FP8 primary weights are skipped: no rank holds their unquantized value.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = chunks
        self._undo = ExitStack()
        self._sums: dict[OperandId, torch.Tensor] = {}

    def __enter__(self) -> OperandProbe:
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, LowPrecLinearMixin):
                    inner = module.bound_gemms
                    probed = _ProbedGemms(inner, self._operands_of(module, inner), self._sums)
                    self._undo.enter_context(instrumented(module, probed))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def found(self) -> list[tuple[OperandId, QuantizationError]]:
        """Errors of the whole model, the same on every rank; a collective call."""
        dense = [parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)]
        mine = _reduced({operand: sums for operand, sums in self._sums.items() if operand.expert < 0}, dense)
        experts = {operand: sums for operand, sums in self._sums.items() if operand.expert >= 0}
        if experts:
            groups = [
                parallel_state.get_expert_tensor_parallel_group(),
                parallel_state.get_expert_data_parallel_group(),
            ]
            mine |= _reduced(experts, groups)
        everyone: list[dict[OperandId, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        found = {operand: sums for part in everyone for operand, sums in part.items()}
        return [(operand, QuantizationError.of(sums)) for operand, sums in sorted(found.items()) if sums[0] > 0]

    def _operands_of(self, module: LowPrecLinearMixin, linear_gemms: LinearGemms) -> dict[tuple[str, str], OperandId]:
        """Ids of a layer's quantized operands; their sums start at zero, since an expert may receive no tokens."""
        operands = {}
        for (gemm, operand), order in _ORDER.items():
            spec = getattr(getattr(linear_gemms.recipe, gemm), operand)
            if spec is not None and not (operand == "weight" and isinstance(module.weight, Fp8Weight)):
                linear = linear_gemms.linear_id
                found = OperandId(linear.layer, linear.name, linear.expert, order, gemm, operand, spec.format)
                operands[gemm, operand] = found
                self._sums[found] = torch.zeros(COUNTS, dtype=torch.float64, device=module.weight.device)
        return operands


def _reduced(sums: dict[OperandId, torch.Tensor], groups: Sequence[dist.ProcessGroup]) -> dict[OperandId, torch.Tensor]:
    """Sums over the groups' ranks, on the first rank of all groups; empty on other ranks and without sums."""
    if not sums:
        return {}
    operands = sorted(sums)
    total = torch.stack([sums[operand] for operand in operands])
    amax = max_over(total[:, -1], *groups)
    for group in groups:
        dist.all_reduce(total, group=group)
    total[:, -1] = amax
    if any(dist.get_rank(group) for group in groups):
        return {}
    return dict(zip(operands, total.cpu(), strict=True))


class _ProbedGemms(InstrumentedGemms):
    """A layer's GEMMs; accumulates the quantization error of each operand."""

    def __init__(
        self,
        inner: LinearGemms,
        operands: dict[tuple[str, str], OperandId],
        sums: dict[OperandId, torch.Tensor],
    ) -> None:
        super().__init__(inner)
        self._operands, self._sums = operands, sums

    def forward(
        self,
        x_TI: torch.Tensor,
        w_OI: torch.Tensor,
        rng_step: RngStep,
        update_amax: bool = True,
        *rest: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, SavedForBackward]:
        if update_amax:  # neither an evaluation nor the first pass of an activation recomputation
            self._inspect("input", x_TI, rng_step)
            self._inspect("weight", w_OI, rng_step)
        return self._inner.forward(x_TI, w_OI, rng_step, update_amax, *rest, **options)

    def grad_output(self, dy_TO: torch.Tensor, rng_step: RngStep, **options: Any) -> GradOutput:
        self._inspect("grad_output", dy_TO, rng_step)
        return self._inner.grad_output(dy_TO, rng_step, **options)

    def _inspect(self, tensor: str, matrix: torch.Tensor, rng_step: RngStep) -> None:
        """Accumulate the error of a matrix in both GEMMs that use it."""
        if rng_step.microbatch or not matrix.numel():
            return
        for gemm, columnwise in zip(SIDES[tensor], (False, True), strict=True):
            operand = self._operands.get((gemm, tensor))
            if operand is not None:
                contracted_last = matrix.t() if columnwise else matrix
                found = self._inner.emulated.error_stats(gemm, tensor, contracted_last, rng_step)
                sums = self._sums[operand]
                found[-1] = torch.maximum(found[-1], sums[-1])
                found[:-1] += sums[:-1]
                self._sums[operand] = found
