"""Codes and scales of a layout against one process's for the same operand, and the correlation of rounding noise.

Every linear layer of this rank quantizes its shard of operands that the layer's name seeds, with the GEMMs and
collectives of training. The unsharded layer, built here, quantizes the whole operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from megatron_lowprec.kernels.philox.reference import ShardSlice
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import DIMS, SIDES, LinearId
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.quantization.amax_history import AmaxHistory, add_tensors
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import block_sizes
from megatron_lowprec.recipe.schema import HistorySpec
from tools.layout_parity.setup import Setup

_TOKENS = 128
_RNG_STEP = RngStep(5, 1)


@dataclass
class _Layer:
    """One linear layer of this rank, its unsharded twin, and the whole operands; ``share`` ranks split the layer."""

    linear_gemms: LinearGemms
    twin: LinearGemms
    operands: dict[str, torch.Tensor]
    share: int = 1

    def parts(self) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
        """(GEMM, operand, this rank's part, the whole), contracted dimension last."""
        for (gemm, operand), dims in DIMS.items():
            by_row = dims in ("TI", "OI", "TO")
            whole = part = self.operands[operand] if by_row else self.operands[operand].t()
            for dimension, name in enumerate(dims):
                part = part.index_select(dimension, self.indices(name, whole.shape[dimension]))
            yield gemm, operand, (part.contiguous() if by_row else part.t().contiguous().t()), whole

    def indices(self, name: str, size: int) -> torch.Tensor:
        """Indices of this rank's shard in dimension I, O or T."""
        span = self.linear_gemms.linear_id.spans.get(name, ShardSlice())
        local = size // self.share if name == self.linear_gemms.linear_id.split else size
        return span.place(torch.arange(local)).to(self.operands["input"].device)


def operands(setup: Setup, recipe: str) -> dict[str, Any]:
    """The number of operands compared on all ranks, and the names of those that differ."""
    setup.enter(recipe)
    layers = list(_layers(setup))
    wrong: list[str] = []
    delayed = bool(setup.trainer.runtime.recipe.delayed_operands())
    for layer in layers if delayed else ():
        for gemm, operand, part, whole in layer.parts():
            _quantized(layer.linear_gemms, gemm, operand, part)
            _quantized(layer.twin, gemm, operand, whole)
    if delayed:
        setup.trainer.runtime.end_step()
        for layer in layers:
            for operand, (history, slot) in layer.twin.histories.items():
                history.update()
                mine, its = layer.linear_gemms.histories[operand]
                if not torch.equal(mine.in_effect[its], history.in_effect[slot]):
                    wrong.append(f"{_name(layer)} {operand}: amax in effect")
    compared = 0
    for layer in layers:
        for gemm, operand, part, whole in layer.parts():
            got = _quantized(layer.linear_gemms, gemm, operand, part)
            want = _quantized(layer.twin, gemm, operand, whole)
            compared += 1
            if not _same(layer, DIMS[gemm, operand], got, want):
                wrong.append(f"{_name(layer)} {gemm} {operand}")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (compared, wrong, [_name(layer) for layer in layers]))
    return {
        "compared": sum(one[0] for one in found),
        "wrong": [f"rank {rank}: {name}" for rank, one in enumerate(found) for name in one[1]],
        "layers": len({name for one in found for name in one[2]}),
    }


def noise(setup: Setup, recipe: str, layers: int | None = None) -> dict[str, Any]:
    """Correlation (in standard deviations) and equality of the rounding errors of data-parallel ranks 0 and 1.

    Args:
        layers: number of linear layers, from the first; None for all.
    """
    setup.enter(recipe)
    errors = []
    for layer in islice(_layers(setup), layers):
        spec = layer.linear_gemms.recipe
        for gemm, operand, _, whole in layer.parts():
            quant = getattr(spec.gemms[gemm], operand)
            if quant is None or quant.rounding != "stochastic":
                continue
            elements, _ = _quantized(layer.linear_gemms, gemm, operand, whole)
            transform = layer.linear_gemms.transforms.at(gemm, _RNG_STEP)
            exact = whole if transform is None else transform.apply(whole)
            errors.append((elements.float() - quant.headroom * exact.float()).flatten().double())
    mine = torch.cat(errors)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    first, second = parts[:2]
    products = first * second
    z = float(products.sum() / products.square().sum().sqrt())
    return {"entries": mine.numel(), "z": z, "same": torch.equal(first, second)}


def _layers(setup: Setup) -> Iterator[_Layer]:
    config, seed = setup.config, setup.config.seed
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    for module in (module for chunk in setup.trainer.chunks for module in chunk.modules()):
        if not isinstance(module, LowPrecLinearMixin):
            continue
        mine = module.bound_gemms
        place, share = mine.linear_id, module.tp_group.size()
        out_features, in_features = module.weight.shape
        if place.split == "O":
            out_features *= share
        elif place.split == "I":
            in_features *= share
        alone = LinearId(place.layer, place.name, place.expert, place.data_parallel_rank)
        device = setup.device

        def history_of(remembered: HistorySpec, device: torch.device = device) -> AmaxHistory:
            return AmaxHistory(remembered, device)

        histories = add_tensors(setup.trainer.runtime.recipe.delayed_operands(), history_of)
        twin = LinearGemms(mine.recipe, alone, seed, history_of, histories=histories, emulate=config.emulate)
        name = f"{place.layer} {place.name} {place.expert}"
        shapes = {
            "input": (_TOKENS, in_features),
            "weight": (out_features, in_features),
            "grad_output": (_TOKENS, out_features),
        }
        tensors = {operand: _seeded(f"{name} {operand}", *shape).to(device, dtype) for operand, shape in shapes.items()}
        for linear_gemms, weight in ((mine, module.weight), (twin, tensors["weight"])):
            linear_gemms.backends.resolve(weight)
        yield _Layer(mine, twin, tensors, share)


def _seeded(name: str, *shape: int) -> torch.Tensor:
    """Normal, with an outlier column and row, so that the amaxes of shards differ."""
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % 2**31)
    values = torch.randn(shape, generator=generator)
    values[:, int(torch.randint(shape[1], (), generator=generator))] *= 16
    values[int(torch.randint(shape[0], (), generator=generator))] *= 5
    return values


def _name(layer: _Layer) -> str:
    place = layer.linear_gemms.linear_id
    return f"layers.{place.layer}.{place.name}" + (f" expert {place.expert}" if place.expert >= 0 else "")


def _quantized(
    linear_gemms: LinearGemms, gemm: str, operand: str, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Data times the tensor's scale, and decode scales of blocks where they are stored separately."""
    columnwise = SIDES[operand][1] == gemm
    source, request = matrix.t() if columnwise else matrix, CastRequest(not columnwise, columnwise)
    quantized, _ = linear_gemms.backends.resolved.gemms[gemm].quantize(operand, source, _RNG_STEP, request)
    data, scale = quantized.columnwise() if columnwise else quantized.rowwise()
    of_tensor = quantized.columnwise_tensor_scale if columnwise else quantized.rowwise_tensor_scale
    if scale is not None and quantized.spec is not None:
        length = block_sizes(quantized.spec, data)[1]
        scale = scale[:, : -(-data.shape[1] // length)]
    return data[: len(matrix)].float() * (1.0 if of_tensor is None else of_tensor), scale


def _same(
    layer: _Layer,
    dims: str,
    got: tuple[torch.Tensor, torch.Tensor | None],
    want: tuple[torch.Tensor, torch.Tensor | None],
) -> bool:
    elements, scale = want
    for dimension, name in enumerate(dims):
        if name != layer.linear_gemms.linear_id.split:
            continue
        size = elements.shape[dimension]
        indices = layer.indices(name, size)
        elements = elements.index_select(dimension, indices)
        if scale is not None and scale.shape[dimension] > 1:
            tile = math.ceil(size / scale.shape[dimension])
            scale = scale.index_select(dimension, indices[::tile] // tile)
    if not torch.equal(got[0], elements) or (got[1] is None) != (scale is None):
        return False
    return scale is None or torch.equal(torch.as_tensor(got[1]), scale)
