"""Memory plan of a run: resident, saved and transient bytes on the GPU with the largest peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.memory.activations import (
    backward_of_a_layer,
    embedding_activations,
    head_activations,
    kept_of_layers,
    logit_bytes,
    recomputed_at_once,
)
from megatron_lowprec.training.memory.layout import Execution, microbatches_in_flight, stage_layers
from megatron_lowprec.training.memory.weights import fp32_gradients, graph_buffers, lasting

GIB = 2.0**30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on a GPU of the pipeline stage with the largest peak.

    ``resident`` lasts through a step, ``kept`` is saved for backward, and of ``transient`` (allocated at different
    times on top of both) the largest counts, and fp32 gradients beside those of the passes. ``held`` is what CUDA
    graphs hold throughout: the part of ``kept`` of the layers, and their backward pass. ``eager`` is what a step with
    a quantization-error snapshot or a capture adds, which runs layers kernel by kernel beside the graphs. ``phase`` is
    that of the recipe's ``phases`` with the largest peak, 0 before the first.
    """

    runs: Execution
    stage: int
    stages: int
    gpus: int
    in_flight: float
    resident: Mapping[str, float]
    kept: Mapping[str, float]
    transient: Mapping[str, float]
    held: float = 0.0
    eager: float = 0.0
    phase: int = 0
    phases: int = 0

    @property
    def peak(self) -> float:
        """Most bytes allocated at once; without graphs activations are free by the time of the weight update.

        Logits reuse the memory of the backward pass, except where it is in the memory pool of CUDA graphs.
        """
        return sum(self.resident.values()) + max(self._passes, self._update)

    @property
    def peaks_in_update(self) -> bool:
        """Whether the peak is at the update of the weights, not in the forward and backward passes."""
        return self._update > self._passes

    @property
    def _update(self) -> float:
        return self.held + self.transient["update"]

    @property
    def _passes(self) -> float:
        logits, backward = (self.transient[name] for name in ("logits", "backward"))
        passes = sum(self.kept.values()) + (logits + backward if self.held else max(logits, backward))
        return passes + self.transient["gradients"] + self.eager


def plan(config: Config, recipe: Recipe, padded_vocab_size: int, gpus: int, arch: str = "") -> MemoryPlan:
    """The plan of a resolved configuration on ``gpus`` processes, one per GPU of that architecture.

    Of a recipe with phases, that of the phase with the largest peak.
    """
    plans = [
        replace(
            _stage_plan(config, Execution(now, arch or config.device or "sm90"), padded_vocab_size, gpus, stage),
            phase=phase,
            phases=len(recipe.phases),
        )
        for phase, now in enumerate(recipe.stages)
        for stage in range(config.pipeline_model_parallel_size)
    ]
    return max(plans, key=lambda found: found.peak)


def _stage_plan(config: Config, runs: Execution, vocabulary: int, gpus: int, stage: int) -> MemoryPlan:
    first, last = stage == 0, stage == config.pipeline_model_parallel_size - 1
    layers = stage_layers(config, stage)
    in_flight = microbatches_in_flight(config, gpus, stage)
    kept = {
        "layers": in_flight * kept_of_layers(config, layers, runs),
        "embedding": in_flight * sum(embedding_activations(config).values()) if first else 0.0,
        "head": sum(head_activations(config).values()) if last else 0.0,
    }
    resident, update = lasting(config, runs, vocabulary, gpus, stage)
    transient = {
        "logits": logit_bytes(config, vocabulary, runs.fused) if last else 0.0,
        "backward": recomputed_at_once(config, layers, runs) + backward_of_a_layer(config, runs),
        "gradients": fp32_gradients(config, runs, vocabulary, gpus, stage),
        "update": update,
    }
    held = eager = 0.0
    if config.cuda_graph_impl == "local":
        resident["buffers of CUDA graphs"] = graph_buffers(config, layers)
        held = kept["layers"] + transient["backward"] + transient["gradients"]
        if config.log_quantization_interval is not None or config.capture_step:
            # its logits are free by the time of its backward pass
            eager = held - min(transient["logits"], transient["backward"])
    stages = config.pipeline_model_parallel_size
    return MemoryPlan(runs, stage, stages, gpus, in_flight, resident, kept, transient, held, eager)
