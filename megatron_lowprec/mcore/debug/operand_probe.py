"""Quantization error of operands and GEMM outputs in one step, over all ranks with shards or replicas of them.

The first microbatch of a training step is measured. The codes that a layer has quantized are compared with their
source; operands whose scales the layer does not keep are quantized once more. A step without the probe has no overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_lowprec.comm.maximum import max_over
from megatron_lowprec.kernels.operand_stats.reference import SUMS
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, SIDES, LinearId
from megatron_lowprec.mcore.debug.instrumented import inspected_casts, instrumented
from megatron_lowprec.mcore.debug.sampled_outputs import RowSample, SampledGemms
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.quantization.error_stats import COUNTS, QuantizationError, error_stats
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS

_PLACES = [(gemm, operand) for gemm, operands in GEMM_OPERANDS.items() for operand in (*operands, "output")]
_ORDER = {place: number for number, place in enumerate(_PLACES)}


class OperandId(NamedTuple):
    """Identifies an operand or the output of a model's GEMM by global numbers; sorts by layer, name, expert and GEMM.

    An ``operand`` "output" has an empty ``format``. ``recipe`` is empty for the run's own recipe, else the name of
    another one that quantized the same tensor.
    """

    layer: int
    name: str
    expert: int
    order: int
    gemm: str
    operand: str
    format: str
    recipe: str = ""

    @property
    def linear(self) -> str:
        """Name as in ``--rerun-in-bf16``, with the expert."""
        return LinearId(self.layer, self.name, self.expert).path


class OperandProbe:
    """Context manager that measures this rank's chunks in a training step's first microbatch.

    FP8 primary weights are skipped: no rank holds their unquantized value.

    Args:
        chunks: this rank's model chunks.
        seed: the run's seed, from which rows of outputs are chosen.
        also: recipes without delayed scaling and phases, whose quantizers are applied to the same tensors.
    """

    def __init__(self, chunks: Sequence[nn.Module], seed: int, also: Sequence[Recipe] = ()) -> None:
        self._chunks, self._seed, self._also = chunks, seed, also
        self._undo = ExitStack()
        self._layers: list[tuple[_OperandStats, SampledGemms]] = []

    def __enter__(self) -> OperandProbe:
        sample = RowSample(self._seed)
        for chunk in self._chunks:
            for module in chunk.modules():
                if isinstance(module, LowPrecLinearMixin):
                    inner = module.bound_gemms
                    operands = _OperandStats(inner, self._counterfactuals(module, inner), module.weight.device)
                    outputs = SampledGemms(inner, sample, module.weight.device)
                    self._layers.append((operands, outputs))
                    self._undo.enter_context(inspected_casts(inner, operands.inspect))
                    self._undo.enter_context(instrumented(module, outputs))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def found(self) -> list[tuple[OperandId, QuantizationError]]:
        """Errors of the whole model, the same on every rank; a collective call."""
        stats: dict[OperandId, torch.Tensor] = {}
        for operands, outputs in self._layers:
            stats |= operands.stats
            stats |= {_id_of(outputs.linear_id, gemm, "output", ""): each for gemm, each in outputs.stats.items()}
        dense = [parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)]
        mine = _reduced({operand: each for operand, each in stats.items() if operand.expert < 0}, dense)
        experts = {operand: each for operand, each in stats.items() if operand.expert >= 0}
        if experts:
            groups = [
                parallel_state.get_expert_tensor_parallel_group(),
                parallel_state.get_expert_data_parallel_group(),
            ]
            mine |= _reduced(experts, groups)
        everyone: list[dict[OperandId, list[float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        found = {operand: each for part in everyone for operand, each in part.items()}
        return [(operand, QuantizationError.of(each)) for operand, each in sorted(found.items()) if each[0] > 0]

    def _counterfactuals(self, module: LowPrecLinearMixin, inner: LinearGemms) -> list[LinearGemms]:
        """GEMMs of the layer under the other recipes that quantize it, with backends chosen as for training."""
        linear_id, found = inner.linear_id, []
        for recipe in self._also:
            linear = recipe.at(Layer(linear_id.layer, linear_id.name, module.config.num_layers))
            if linear.quantized:
                found.append(inner.under(linear))
                found[-1].backends.resolve(module.weight)
        return found


class _OperandStats:
    """Statistics of a layer's operands, from the tensors that its backends quantize.

    Attributes:
        stats: operand -> ``operand_stats``; zeros if nothing was quantized, as for an expert without tokens.
    """

    def __init__(self, own: LinearGemms, also: Sequence[LinearGemms], device: torch.device) -> None:
        self._own, self._also = own, also
        self._ids = {id(gemms): _ids_of(gemms, "" if gemms is own else gemms.recipe.name) for gemms in (own, *also)}
        zeros = torch.zeros(COUNTS, dtype=torch.float64, device=device)
        self.stats = {operand: zeros for ids in self._ids.values() for operand in ids.values()}
        self._measured: set[OperandId] = set()

    def inspect(self, tensor: str, matrix: torch.Tensor, rng_step: RngStep, quantized: QuantizedTensor) -> None:
        """Measure a tensor [M, N] in the GEMMs for which it was quantized, and in all GEMMs of the other recipes."""
        if rng_step.microbatch or not matrix.numel():
            return
        rowwise: torch.Tensor | None = None
        for columnwise, gemm in enumerate(SIDES[tensor]):
            data, scale = quantized.rowwise_data, quantized.rowwise_scale
            if columnwise:
                data, scale = quantized.columnwise_data, quantized.columnwise_scale
            operand = self._unmeasured(self._own, gemm, tensor)
            if operand is None or data is None:
                continue
            self._measured.add(operand)
            transform = self._own.transforms.at(gemm, rng_step)
            if scale is None or quantized.scale_layout != "plain":  # multiplied into the data, or in a GEMM's tiles
                backend = self._own.backends.resolved.gemms[gemm]
                self.stats[operand] = backend.error_stats(gemm, tensor, matrix, rng_step)
            elif rowwise is not None and transform is None and _same_both_ways(quantized):
                self.stats[operand] = rowwise
            else:
                signs = None if transform is None else transform.signs(matrix.device)
                self.stats[operand] = error_stats(matrix, quantized, columnwise=bool(columnwise), signs=signs)
            rowwise = self.stats[operand] if transform is None else None
        for other in self._also:
            for gemm in SIDES[tensor]:
                operand = self._unmeasured(other, gemm, tensor)
                if operand is not None:
                    self._measured.add(operand)
                    backend = other.backends.resolved.gemms[gemm]
                    self.stats[operand] = backend.error_stats(gemm, tensor, matrix, rng_step)

    def _unmeasured(self, gemms: LinearGemms, gemm: str, tensor: str) -> OperandId | None:
        """An operand that the recipe quantizes, until measured: an activation recomputation quantizes it again."""
        operand = self._ids[id(gemms)].get((gemm, tensor))
        return None if operand in self._measured else operand


def _same_both_ways(quantized: QuantizedTensor) -> bool:
    """Whether columnwise codes are the transposed rowwise ones: rounded alike under one scale."""
    spec = quantized.spec
    return spec is not None and spec.granularity == "tensor" and spec.rounding != "stochastic"


def _ids_of(gemms: LinearGemms, recipe: str) -> dict[tuple[str, str], OperandId]:
    """Ids of the operands that a layer's recipe quantizes, by GEMM and operand."""
    specs = {place: getattr(gemms.recipe.gemms[place[0]], place[1]) for place in DIMS}
    return {
        place: _id_of(gemms.linear_id, *place, spec.format, recipe) for place, spec in specs.items() if spec is not None
    }


def _id_of(linear: LinearId, gemm: str, operand: str, format: str, recipe: str = "") -> OperandId:
    return OperandId(linear.layer, linear.name, linear.expert, _ORDER[gemm, operand], gemm, operand, format, recipe)


def _reduced(stats: dict[OperandId, torch.Tensor], groups: Sequence[dist.ProcessGroup]) -> dict[OperandId, list[float]]:
    """Over the groups' ranks, on the first rank of all groups; empty on other ranks and without operands."""
    if not stats:
        return {}
    operands = sorted(stats)
    total = torch.stack([stats[operand] for operand in operands])
    maxima = max_over(total[:, SUMS:].contiguous(), *groups)
    for group in groups:
        dist.all_reduce(total, group=group)
    total[:, SUMS:] = maxima
    if any(dist.get_rank(group) for group in groups):
        return {}
    return dict(zip(operands, total.tolist(), strict=True))  # as tensors each would be sent with the storage of all
