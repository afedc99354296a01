"""Quantization error of each operand of each GEMM in one step, over all ranks that hold parts or copies of it.

The step is a training step: its operands are quantized once more beside it, those of the first microbatch. A step
without the probe pays nothing for it.
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

_ORDER = {place: number for number, place in enumerate(DIMS)}


class OperandId(NamedTuple):
    """An operand of a model, by global numbers; they sort by layer, name, expert and GEMM."""

    layer: int
    name: str
    expert: int
    order: int
    gemm: str
    operand: str
    format: str

    @property
    def linear(self) -> str:
        """As ``--rerun-in-bf16`` names it, and the expert."""
        return LinearId(self.layer, self.name, self.expert).path


class OperandProbe:
    """Measures, as a context manager, the operands of this rank's chunks in the first microbatch of a training step.

    FP8 primary weights are left out: they have no other value on a rank.
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
        """Of the whole model, the same on every rank; all ranks ask together."""
        dense = [parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)]
        mine = _reduced({place: sums for place, sums in self._sums.items() if place.expert < 0}, dense)
        experts = {place: sums for place, sums in self._sums.items() if place.expert >= 0}
        if experts:
            groups = [
                parallel_state.get_expert_tensor_parallel_group(),
                parallel_state.get_expert_data_parallel_group(),
            ]
            mine |= _reduced(experts, groups)
        everyone: list[dict[OperandId, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        found = {place: sums for part in everyone for place, sums in part.items()}
        return [(place, QuantizationError.of(sums)) for place, sums in sorted(found.items()) if sums[0] > 0]

    def _operands_of(self, module: LowPrecLinearMixin, linear_gemms: LinearGemms) -> dict[tuple[str, str], OperandId]:
        """Of a layer's quantized operands; each has sums from the start, since an expert may see no tokens."""
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
    """Over the groups' ranks, on the first rank of all; nothing on others, nor without sums."""
    if not sums:
        return {}
    places = sorted(sums)
    total = torch.stack([sums[place] for place in places])
    amax = max_over(total[:, -1], *groups)
    for group in groups:
        dist.all_reduce(total, group=group)
    total[:, -1] = amax
    if any(dist.get_rank(group) for group in groups):
        return {}
    return dict(zip(places, total.cpu(), strict=True))


class _ProbedGemms(InstrumentedGemms):
    """A layer's GEMMs; adds up the quantization error of each operand."""

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
        if update_amax:  # not an evaluation, nor the first pass of an activation recomputation
            self._inspect("input", x_TI, rng_step)
            self._inspect("weight", w_OI, rng_step)
        return self._inner.forward(x_TI, w_OI, rng_step, update_amax, *rest, **options)

    def grad_output(self, dy_TO: torch.Tensor, rng_step: RngStep, **options: Any) -> GradOutput:
        self._inspect("grad_output", dy_TO, rng_step)
        return self._inner.grad_output(dy_TO, rng_step, **options)

    def _inspect(self, tensor: str, matrix: torch.Tensor, rng_step: RngStep) -> None:
        """Add the error of a matrix in both GEMMs that contract it."""
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
