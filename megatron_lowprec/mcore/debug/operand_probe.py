"""How well each operand of each GEMM is represented in one step, over all ranks that hold parts or copies of it.

The step is the run's own: its operands are quantized once more beside it, and the numbers of its first microbatch are
kept. A step without this pays nothing for it.
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
from megatron_lowprec.linear.gemms import DIMS, SIDES, LinearId
from megatron_lowprec.linear.layer_tensors import GradOutput, SavedForBackward
from megatron_lowprec.linear.linear_gemms import LinearGemms
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
    """While it is entered, looks at the operands of this rank's chunks in the first microbatch of a training step.

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
                    probed = _ProbedNumerics(inner, self._places(module, inner), self._sums)
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

    def _places(self, module: LowPrecLinearMixin, linear_gemms: LinearGemms) -> dict[tuple[str, str], OperandId]:
        """Of a layer's quantized operands; each has sums from the start, since an expert may see no tokens."""
        places = {}
        for (gemm, operand), order in _ORDER.items():
            spec = getattr(getattr(linear_gemms.recipe, gemm), operand)
            if spec is not None and not (operand == "weight" and isinstance(module.weight, Fp8Weight)):
                layer, name, expert = linear_gemms.place.layer, linear_gemms.place.name, linear_gemms.place.expert
                place = OperandId(layer, name, expert, order, gemm, operand, spec.format)
                places[gemm, operand] = place
                self._sums[place] = torch.zeros(COUNTS, dtype=torch.float64, device=module.weight.device)
        return places


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


class _ProbedNumerics(InstrumentedGemms):
    """The operands of a layer looked at."""

    def __init__(
        self,
        inner: LinearGemms,
        places: dict[tuple[str, str], OperandId],
        sums: dict[OperandId, torch.Tensor],
    ) -> None:
        super().__init__(inner)
        self._places, self._sums = places, sums

    def forward(
        self,
        x_TI: torch.Tensor,
        w_OI: torch.Tensor,
        rng_step: RngStep,
        update_amax: bool = True,
        bias_O: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, SavedForBackward]:
        if update_amax:  # not an evaluation, nor the first pass of an activation recomputation
            self._look("input", x_TI, rng_step)
            self._look("weight", w_OI, rng_step)
        return self._inner.forward(x_TI, w_OI, rng_step, update_amax, bias_O, **options)

    def grad_output(self, dy_TO: torch.Tensor, rng_step: RngStep, **options: Any) -> GradOutput:
        self._look("grad_output", dy_TO, rng_step)
        return self._inner.grad_output(dy_TO, rng_step, **options)

    def _look(self, operand: str, matrix: torch.Tensor, rng_step: RngStep) -> None:
        """At what both GEMMs that contract the matrix make of it, its rows and its columns."""
        if rng_step.microbatch or not matrix.numel():
            return
        for gemm, by_columns in zip(SIDES[operand], (False, True), strict=True):
            place = self._places.get((gemm, operand))
            if place is not None:
                contracted_last = matrix.t() if by_columns else matrix
                sums, found = self._sums[place], self._inner.error_stats(gemm, operand, contracted_last, rng_step)
                found[-1] = torch.maximum(found[-1], sums[-1])
                found[:-1] += sums[:-1]
                self._sums[place] = found
