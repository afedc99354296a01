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
from megatron_lowprec.linear.gemms import DIMS, SIDES, LinearPlace
from megatron_lowprec.linear.linear_gemms import LinearNumerics
from megatron_lowprec.linear.operands import GradOutput, Kept
from megatron_lowprec.mcore.debug.instrumented import WatchedNumerics, watched
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.quantization.error_stats import COUNTS, Fidelity
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.quantization.random_stream import Moment

_ORDER = {place: number for number, place in enumerate(DIMS)}


class OperandPlace(NamedTuple):
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
        return LinearPlace(self.layer, self.name, self.expert).path


class OperandProbe:
    """While it is entered, looks at the operands of this rank's chunks in the first microbatch of a training step.

    FP8 primary weights are left out: they have no other value on a rank.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = chunks
        self._undo = ExitStack()
        self._sums: dict[OperandPlace, torch.Tensor] = {}

    def __enter__(self) -> OperandProbe:
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, LowPrecLinearMixin):
                    inner = module.bound_numerics
                    probed = _ProbedNumerics(inner, self._places(module, inner), self._sums)
                    self._undo.enter_context(watched(module, probed))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def found(self) -> list[tuple[OperandPlace, Fidelity]]:
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
        everyone: list[dict[OperandPlace, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        found = {place: sums for part in everyone for place, sums in part.items()}
        return [(place, Fidelity.of(sums)) for place, sums in sorted(found.items()) if sums[0] > 0]

    def _places(self, module: LowPrecLinearMixin, numerics: LinearNumerics) -> dict[tuple[str, str], OperandPlace]:
        """Of a layer's quantized operands; each has sums from the start, since an expert may see no tokens."""
        places = {}
        for (gemm, operand), order in _ORDER.items():
            spec = getattr(getattr(numerics.recipe, gemm), operand)
            if spec is not None and not (operand == "weight" and isinstance(module.weight, Fp8Weight)):
                layer, name, expert = numerics.place.layer, numerics.place.name, numerics.place.expert
                place = OperandPlace(layer, name, expert, order, gemm, operand, spec.format)
                places[gemm, operand] = place
                self._sums[place] = torch.zeros(COUNTS, dtype=torch.float64, device=module.weight.device)
        return places


def _reduced(
    sums: dict[OperandPlace, torch.Tensor], groups: Sequence[dist.ProcessGroup]
) -> dict[OperandPlace, torch.Tensor]:
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


class _ProbedNumerics(WatchedNumerics):
    """The operands of a layer looked at."""

    def __init__(
        self,
        inner: LinearNumerics,
        places: dict[tuple[str, str], OperandPlace],
        sums: dict[OperandPlace, torch.Tensor],
    ) -> None:
        super().__init__(inner)
        self._places, self._sums = places, sums

    def forward(
        self,
        x_TI: torch.Tensor,
        w_OI: torch.Tensor,
        moment: Moment,
        observe: bool = True,
        bias_O: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, Kept]:
        if observe:  # not an evaluation, nor the first pass of an activation recomputation
            self._look("input", x_TI, moment)
            self._look("weight", w_OI, moment)
        return self._inner.forward(x_TI, w_OI, moment, observe, bias_O, **options)

    def grad_output(self, dy_TO: torch.Tensor, moment: Moment, **options: Any) -> GradOutput:
        self._look("grad_output", dy_TO, moment)
        return self._inner.grad_output(dy_TO, moment, **options)

    def _look(self, operand: str, matrix: torch.Tensor, moment: Moment) -> None:
        """At what both GEMMs that contract the matrix make of it, its rows and its columns."""
        if moment.microbatch or not matrix.numel():
            return
        for gemm, by_columns in zip(SIDES[operand], (False, True), strict=True):
            place = self._places.get((gemm, operand))
            if place is not None:
                contracted_last = matrix.t() if by_columns else matrix
                sums, found = self._sums[place], self._inner.fidelity_sums(gemm, operand, contracted_last, moment)
                found[-1] = torch.maximum(found[-1], sums[-1])
                found[:-1] += sums[:-1]
                self._sums[place] = found
