"""Prints the memory plan as a table, and raises an error if it exceeds the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.config.accumulation_options import resolve_accumulation
from megatron_lowprec.training.config.graph_options import resolve_cuda_graphs, without_graphs
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import describe_layout, layout_of, resolve_run
from megatron_lowprec.training.data.tokenizer import padded_vocab_size, tokenizer_of
from megatron_lowprec.training.memory.activations import layer_activations
from megatron_lowprec.training.memory.plan import GIB, MemoryPlan, plan
from megatron_lowprec.training.memory.transfers import planned_transfers

_NEARLY = 0.9  # of a GPU: the allocator reserves a few percent more than it allocates
_EAGER = "a step with a snapshot or capture, beside CUDA graphs"


@dataclass(frozen=True)
class Device:
    """A GPU's name and bytes."""

    name: str
    size: int


def this_gpu(local_rank: int) -> Device | None:
    """The GPU of this process, or None."""
    import torch

    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(local_rank)
    return Device(found.name, found.total_memory)


def planned(config: Config, recipe: Recipe, world_size: int, device: Device | None) -> list[str]:
    """Output of --memory-plan, for a configuration after ``resolve_model``; data need not exist."""
    model_ranks = config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size
    gpus = config.memory_plan_gpus or max(world_size, model_ranks * config.expert_model_parallel_size)
    without_data = replace(
        config,
        mock_data=True,
        sft=False,
        data_path=None,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
        data_phase_path=None,
        data_phase_switch=None,
        data_phase_switch_samples=None,
    )
    config = resolve_run(without_data, gpus, gpus=True)
    automatic = config.cuda_graph_impl == "auto"
    config, notes = resolve_accumulation(config, recipe, gpus, config.device or "sm90")
    config, more = resolve_cuda_graphs(config, recipe, gpus, gpus=True)
    notes = notes + more
    vocabulary = padded_vocab_size(
        tokenizer_of(config).vocab_size, config.make_vocab_size_divisible_by, config.tensor_model_parallel_size
    )
    found = plan(config, recipe, vocabulary, gpus)
    if automatic and device is not None and not config.no_memory_check:
        config, found, more = eager_if_close(config, found, device, lambda eager: plan(eager, recipe, vocabulary, gpus))
        notes = notes + more
    return notes + table(found, config, recipe, device)


def eager_if_close(
    config: Config, found: MemoryPlan, device: Device, plan_of: Callable[[Config], MemoryPlan]
) -> tuple[Config, MemoryPlan, list[str]]:
    """Give up the CUDA graphs of ``--cuda-graph-impl auto`` if their memory is close to the GPU's.

    Args:
        config: after ``resolve_cuda_graphs``.
        found: its plan.
        plan_of: the plan of another configuration.

    Returns:
        configuration, its plan, and the reason for eager layers if there is one.
    """
    if config.cuda_graph_impl != "local" or not is_close(found, device):
        return config, found, []
    config = without_graphs(config)
    return config, plan_of(config), ["CUDA graphs: off, memory is close to the GPU's"]


def table(found: MemoryPlan, config: Config, recipe: Recipe, device: Device | None) -> list[str]:
    """The plan, one line per part; each block is in GiB, or in MiB if all of it is small."""
    where = f", the fullest of {found.stages} pipeline stages: {found.stage}" if found.stages > 1 else ""
    at = f"phase {found.phase} of {found.phases}" if found.phase else f"before phase 1 of {found.phases}"
    when = f", {at}, where it is largest" if found.phases else ""
    of = f"{config.device} " if config.device else ""
    lines = [
        f"memory plan of one of {found.gpus} {of}GPUs{where}; recipe {recipe.name}{when}, "
        f"microbatches of {config.steps.micro_batch_size} x {config.shape.seq_length} tokens",
        f"parallelism: {describe_layout(layout_of(config, found.gpus))}",
    ]
    held = f"{found.in_flight:g} microbatch{'' if found.in_flight == 1 else 'es'}"
    names = {
        "layers": f"activations of the layers, {held}",
        "embedding": f"activations of the embedding, {held}",
        "head": "activations of final norm and output layer",
        "logits": "logits and cross-entropy (*)",
        "backward": "backward of a layer (*)",
        "gradients": "gradients in fp32, until they are cast",
        "update": f"update of the weights, {'beside' if found.held else 'without'} activations of the layers",
        "eager": _EAGER,
    }
    parts = {**found.kept, **found.transient, "eager": found.eager}
    for name in ("gradients", "eager"):  # gradients in a buffer are resident
        if not parts[name]:
            del parts[name]
    peak = f"peak ({'update' if found.peaks_in_update else 'forward and backward'})"
    lines += _rows({**found.resident, **{names[name]: size for name, size in parts.items()}, peak: found.peak})
    counts = "CUDA graphs hold the second: both count" if found.held else "not at the same time: the larger counts"
    lines.append(f"(*) {counts}; formulas: docs/guide/memory.md")
    lines.append("a layer keeps of a microbatch:")
    lines += _rows(layer_activations(config, found.runs))
    if config.sequence_parallel and config.transformer_impl == "local":
        lines.append("linear layers of the model: a rank receives for a microbatch, by sequence parallelism:")
        lines += _rows(planned_transfers(config, recipe))
    if device is None:
        least = math.ceil(found.peak / _NEARLY / GIB)
        lines.append(f"a GPU of {least} GiB holds it, beside CUDA's context, NCCL and what the allocator keeps free")
    else:
        lines.append(f"{device.name}: {device.size / GIB:.1f} GiB, so the plan takes {found.peak / device.size:.0%}")
    return lines


def _rows(sizes: Mapping[str, float]) -> list[str]:
    unit, unit_name = (GIB, "GiB") if max(sizes.values(), default=0) >= GIB else (2**20, "MiB")
    return [f"  {name:<56}{size / unit:>10.3f} {unit_name}" for name, size in sizes.items()]


def is_close(found: MemoryPlan, device: Device) -> bool:
    """Whether what the allocator reserves may exceed the GPU's memory."""
    return found.peak > _NEARLY * device.size


def check(found: MemoryPlan, device: Device) -> list[str]:
    """Header lines of a run: the plan, with a warning if it is close to the GPU's memory.

    Raises:
        UserError: the plan exceeds the GPU's memory.
    """
    share = found.peak / device.size
    if share > 1:
        parts = {
            "weights, gradients and optimizer": sum(found.resident.values()),
            "activations": sum(found.kept.values()),
            "logits": found.transient["logits"],
        }
        if found.held:
            parts["backward of a layer"] = found.transient["backward"]
        if found.eager:
            parts[_EAGER] = found.eager
        if found.transient["gradients"]:
            parts["fp32 gradients"] = found.transient["gradients"]
        first = "use --cuda-graph-impl none, " if found.eager else ""
        if found.resident["kept quantized weights"]:
            first += "add --no-cache-weights, "
        raise UserError(
            f"the run needs {found.peak / GIB:.1f} GiB on a GPU ("
            + ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
            + f"), but {device.name} has {device.size / GIB:.1f}: {first}lower --micro-batch-size, add "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 or "
            "--use-distributed-optimizer, or raise --tensor-model-parallel-size; --memory-plan shows all parts, "
            "--no-memory-check starts all the same"
        )
    close = "; close: --memory-plan shows the parts" if is_close(found, device) else ""
    return [f"memory: {found.peak / GIB:.1f} GiB planned of {device.size / GIB:.1f} on a GPU{close}"]
