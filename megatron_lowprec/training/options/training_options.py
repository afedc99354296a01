"""Options of a run's steps, of its ranks and of their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowprec.training.options.declaration import Group, Part, arg


@dataclass(frozen=True)
class TrainingOptions(Group):
    """training"""

    PART = Part.EXECUTION

    micro_batch_size: int | None = arg(
        None,
        "samples of one forward pass on one rank; default: all of its share",
        Part.UPDATE,  # wgrad's blocks along tokens, scales of whole tensors and draws follow it
        least=1,
        grouped=False,
    )
    global_batch_size: int | None = arg(
        None, "samples of one iteration; default micro-batch x data-parallel size", Part.UPDATE, least=1
    )
    rampup_batch_size: list[int] | None = arg(
        None,
        "START INCREMENT SAMPLES: grow the global batch over the first SAMPLES; needs --train-samples",
        Part.UPDATE,
    )
    train_iters: int | None = arg(None, "iterations of the whole run", Part.SCHEDULE, least=1, one_of="length")
    train_samples: int | None = arg(
        None, "samples of the whole run, instead of --train-iters", Part.SCHEDULE, least=1, one_of="length"
    )
    bf16: bool = arg(
        False, "bf16 weights and activations, fp32 main weights", Part.UPDATE, inference=True, optimizer_state=True
    )
    calculate_per_token_loss: bool = arg(
        False,
        "give every token with a loss the same weight, instead of every microbatch; --sft sets it",
        Part.UPDATE,
    )
    seed: int = arg(
        1234,
        "of weights, dropout, training order and stochastic rounding; validation's order is fixed",
        Part.UPDATE,
        least=0,
        most=2**32 - 1,
        inference=True,
        own_note=True,
        sweep="seeds:",
        grouped=False,
    )
    deterministic_mode: bool = arg(
        False, "only algorithms that give the same bits each time; slower on a GPU", inference=True
    )
    no_gradient_accumulation_fusion: bool = arg(
        False, "round a weight gradient to bf16 before it is added to main_grad", Part.UPDATE, grouped=False
    )
    fp8_accumulate_wgrad: bool | None = arg(
        None,
        "let cuBLASLt add FP8 weight gradients of one scale a tensor to main_grad, which torch adds in a second pass, "
        "rounding once more; by default on from 1e9 parameters on in dense models with several microbatches a step "
        "(ours)",
        Part.UPDATE,
        needs="transformer_impl=local !no_gradient_accumulation_fusion !grad_reduce_in_bf16",
        formerly=False,
        grouped=False,
    )
    emulate: bool = arg(False, "multiply in the compute dtype also where the GPU has FP8 products", inference=True)
    native: Literal["auto", "require", "off"] = arg(
        "auto",
        "MX and NVFP4 products of Blackwell, which the project has not run: auto compares the first of each size with "
        "the emulated one and emulates if they differ; require ends the run then, or if any GEMM is emulated; off "
        "emulates",
        inference=True,
    )
    emulate_accumulator: bool = arg(
        False,
        "sum emulated GEMMs whose recipe has fast_accumulation as Hopper's FP8 units do, in 14 bits; slow, for small "
        "models",
        Part.UPDATE,
        needs="transformer_impl=local",
        inference=True,
    )
    transformer_impl: Literal["local", "transformer_engine"] = arg(
        "local",
        "local: this project's layers; transformer_engine: TransformerEngine's, for the recipes that it has",
        Part.UPDATE,
        inference=True,
        own_note=True,
        grouped=False,
        draws=True,
    )
    attention_backend: Literal["auto", "local"] = arg(
        "auto",
        "auto: SDPA or TE; local: Megatron-core's unfused attention",
        needs="transformer_impl=local",
        inference=True,
    )
    flash_attention_version: int | None = arg(
        None,
        "attention by FlashAttention 2, 3 or 4, of which 3 and 4 are packages to install and have no dropout; by "
        "default torch chooses, cuDNN's on Hopper",
        least=2,
        most=4,
        needs="bf16 transformer_impl=local attention_backend=auto !reset_attention_mask !multi_latent_attention",
    )
    use_cpu_initialization: bool = arg(
        False,
        "draw the initial weights on the CPU: the same for every tensor-parallel size",
        Part.START,
        inference=True,
    )
    recompute_granularity: Literal["full", "selective"] | None = arg(None, "recompute activations in the backward pass")
    recompute_gelu: bool = arg(
        False,
        "on a GPU, keep only the output of linear_fc1 and compute its GELU or SwiGLU again in the backward pass",
        needs="transformer_impl=local",
    )
    save_memory: bool | None = arg(
        None,
        "quantized layers keep less, with the same bits: outputs of norms are computed and attention's are cast again "
        "in the backward pass, and weights are cast for each microbatch; by default on from 1e9 parameters on (ours)",
        needs="transformer_impl=local",
        formerly=False,
    )
    no_cache_weights: bool = arg(
        False,
        "keep no quantized weight, and no transposed copy of an FP8 one, from a microbatch to the next (ours)",
        needs="transformer_impl=local !no_lowprec_linears",
    )
    output_layer_chunk_size: int | None = arg(
        None,
        "compute logits and losses of so many tokens at once, in the backward pass once more, with weight gradients "
        "summed in the fp32 main_grad; last bits of sums differ (ours)",
        Part.UPDATE,
        least=1,
        needs="!no_gradient_accumulation_fusion !grad_reduce_in_bf16",
        grouped=False,
    )
    recompute_method: Literal["uniform", "block"] | None = arg(
        None, "which layers full recompute takes", needs="recompute_granularity=full"
    )
    recompute_num_layers: int | None = arg(
        None,
        "layers of one recomputed chunk (uniform) or recomputed layers (block)",
        least=1,
        needs="recompute_granularity=full",
    )
    cuda_graph_impl: Literal["auto", "none", "local"] = arg(
        "auto",
        "local: capture each layer's forward and backward pass in CUDA graphs, so that the GPU does not wait for "
        "Python; auto: on GPUs where layers can be captured",
        by_rank=True,
    )
    max_skipped_steps: int = arg(
        10, "stop with a report after this many iterations in a row with a non-finite loss or gradient (ours)", least=1
    )
    exit_interval: int | None = arg(None, "save and stop at every iteration that this divides", Part.OUTPUT, least=1)
    exit_duration_in_mins: float | None = arg(None, "save and stop after this many minutes", Part.OUTPUT, least=0)
    exit_signal_handler: bool = arg(
        True, "save and stop at SIGTERM or SIGUSR1 (ours: on unless --no-exit-signal-handler)", Part.OUTPUT
    )
    manual_gc: bool = arg(
        False, "collect Python's garbage at the same iterations on all ranks, not when a rank fills up"
    )
    manual_gc_interval: int = arg(
        0, "iterations between collections of --manual-gc; 0 for one at the start", least=0, needs="manual_gc"
    )
    no_manual_gc_eval: bool = arg(False, "leave out --manual-gc's collections around an evaluation", needs="manual_gc")
    profile: bool = arg(False, "write a trace of torch's profiler into the run's folder", Part.OUTPUT)
    profile_step_start: int = arg(10, "first profiled iteration", Part.OUTPUT)
    profile_step_end: int = arg(12, "iteration at which profiling ends", Part.OUTPUT)


@dataclass(frozen=True)
class ParallelOptions(Group):
    """parallelism"""

    PART = Part.LAYOUT

    tensor_model_parallel_size: int = arg(1, "ranks that share every layer", least=1, draws=True)
    pipeline_model_parallel_size: int = arg(1, "stages that the layers are cut into", least=1, draws=True)
    num_layers_per_virtual_pipeline_stage: int | None = arg(
        None, "interleave: layers of one chunk of a stage", least=1, one_of="interleaving", draws=True
    )
    num_virtual_stages_per_pipeline_rank: int | None = arg(
        None, "interleave: chunks of a stage", least=1, one_of="interleaving", draws=True
    )
    context_parallel_size: int = arg(
        1,
        "ranks that share a sequence (only --transformer-impl transformer_engine)",
        least=1,
        needs="transformer_impl=transformer_engine",
    )
    expert_model_parallel_size: int = arg(1, "ranks that share the experts", least=1, draws=True)
    expert_tensor_parallel_size: int | None = arg(
        None,
        "ranks that share every expert: 1 with --expert-model-parallel-size above 1, else "
        "--tensor-model-parallel-size; other values are refused",
    )
    sequence_parallel: bool = arg(False, "also shard norms and dropout, along the sequence")
    use_distributed_optimizer: bool = arg(
        False, "cut optimizer state over the data-parallel ranks", optimizer_state=True
    )
    overlap_grad_reduce: bool = arg(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = arg(False, "gather weights during the forward pass")
    grad_reduce_in_bf16: bool = arg(False, "keep and reduce gradients in bf16 instead of fp32", Part.UPDATE)
    distributed_backend: Literal["nccl", "gloo"] | None = arg(None, "default nccl with GPUs, else gloo")
    distributed_timeout_minutes: int = arg(10, "after which a collective fails", Part.OUTPUT, least=1)


@dataclass(frozen=True)
class MemoryOptions(Group):
    """memory (ours)"""

    PART = Part.OUTPUT

    memory_plan: bool = arg(False, "print what a GPU will hold, part by part, and stop", sweep="pretrain_gpt.py itself")
    memory_plan_gpus: int | None = arg(
        None,
        "GPUs to plan for; default those of this launch, but no fewer than the parallel sizes need",
        least=1,
        needs="memory_plan",
    )
    no_memory_check: bool = arg(False, "start even where the plan does not fit into the GPU")
