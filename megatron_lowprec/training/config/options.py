"""Options of a run as typed fields, under the names of Megatron's flags.

A field ``num_layers`` is the flag ``--num-layers`` and the YAML key ``num-layers`` (or ``num_layers``). Defaults are
Megatron's unless the help says otherwise. Each group of options is a class, whose docstring is the group's title.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowprec.training.config.fields import arg
from megatron_lowprec.training.models.deepseek.options import LatentAttentionOptions
from megatron_lowprec.training.models.moe.options import MoeOptions


@dataclass(frozen=True)
class RecipeOptions:
    """low precision (ours)"""

    recipe: str = arg(
        "bf16", "a named recipe (--list-recipes) or a YAML file with one; a run that resumes takes the checkpoint's"
    )
    recipe_override: list[str] = arg(
        [], "change one field of the recipe, as in dgrad.hadamard.block=128; may be repeated"
    )
    recipe_phase_iters: int | None = arg(
        None,
        "iterations of which a phase's from_fraction is a fraction, in place of train-iters; a run that resumes keeps "
        "the checkpoint's",
    )
    rerun_in_bf16: list[str] = arg(
        [], "run single GEMMs unquantized to see which one is at fault, as in layers.3.mlp.linear_fc1.dgrad; globs"
    )
    no_self_test: bool = arg(False, "skip the test of quantizers, random numbers and products on this device")
    list_recipes: bool = arg(False, "print the named recipes and stop")
    explain_recipe: bool = arg(False, "print what every GEMM of every linear layer of this model runs in, and stop")
    device: str | None = arg(
        None,
        "a GPU's compute capability such as sm100, for which --explain-recipe and --memory-plan answer, "
        "or cpu for the former",
    )
    fp8_param_gather: bool = arg(
        False,
        "keep linear layers' weights as FP8 codes, without a bf16 copy, and gather them so; needs "
        "--use-distributed-optimizer, and a recipe with one FP8 weight for fprop and dgrad",
    )
    fp8_sequence_parallel_gather: bool = arg(
        False,
        "gather inputs and output gradients of linear layers as FP8 codes under --sequence-parallel: the same codes, "
        "half the bytes; needs a recipe of delayed scales (fp8_delayed, fp8_lm)",
    )
    no_amax_reduce: bool = arg(
        False,
        "let each tensor-parallel rank take a current scale from its own part: no collective for it, but codes then "
        "depend on the tensor-parallel size",
    )
    calibrate_amax: bool = arg(
        False,
        "delayed scaling: before a new run's first step, fill the amax histories by passes over its batch without an "
        "update; else that step is taken with scale 1, as TransformerEngine takes it",
    )
    share_rng_across_dp: bool = arg(
        False, "draw the same rounding noise and signs on every data-parallel rank (to study what that does)"
    )
    no_lowprec_linears: bool = arg(
        False, "keep Megatron-core's own linear layers (for comparisons; the recipe must be bf16)"
    )


@dataclass(frozen=True)
class ModelOptions:
    """model"""

    num_layers: int | None = arg(None, "transformer layers")
    hidden_size: int | None = arg(None, "width of the residual stream")
    ffn_hidden_size: int | None = arg(
        None, "width of the MLP; default 4 x hidden, with --swiglu 2/3 of it in multiples of 64"
    )
    num_attention_heads: int | None = arg(None, "attention heads")
    kv_channels: int | None = arg(None, "channels of a head; default hidden / heads")
    group_query_attention: bool = arg(False, "let groups of heads share keys and values")
    num_query_groups: int = arg(1, "groups of --group-query-attention")
    seq_length: int | None = arg(None, "tokens of a sample")
    max_position_embeddings: int | None = arg(None, "length of the learned position table; default --seq-length")
    position_embedding_type: Literal["learned_absolute", "rope"] = arg("learned_absolute", "kind of position embedding")
    rotary_base: int = arg(10000, "base period of rope")
    rotary_percent: float = arg(1.0, "share of a head's channels that rope turns")
    use_rope_scaling: bool = arg(False, "Llama 3's scaling of rope's low frequencies, from 8192 tokens")
    rope_scaling_factor: float = arg(8.0, "factor of --use-rope-scaling: 8 in Llama 3.1, 32 in 3.2")
    rope_type: Literal["rope", "yarn"] = arg("rope", "yarn: rope with YaRN's scaling (arXiv 2309.00071)")
    rotary_scaling_factor: float = arg(1.0, "YaRN's factor of the context's length")
    yarn_original_max_position_embeddings: int | None = arg(None, "YaRN's length before the extension")
    yarn_beta_fast: float = arg(32.0, "YaRN's turns in that length from which a frequency is kept")
    yarn_beta_slow: float = arg(1.0, "YaRN's turns in that length up to which it is divided by the factor")
    normalization: Literal["LayerNorm", "RMSNorm"] = arg("LayerNorm", "kind of norm")
    norm_epsilon: float = arg(1e-5, "epsilon of the norms")
    swiglu: bool = arg(False, "gated SiLU in the MLP instead of GELU")
    squared_relu: bool = arg(False, "squared ReLU in the MLP instead of GELU")
    disable_bias_linear: bool = arg(False, "no bias in the linear layers")
    add_qkv_bias: bool = arg(False, "a bias in the QKV projection even with --disable-bias-linear")
    qk_layernorm: bool = arg(
        False, "a norm of each head's queries and keys; with --multi-latent-attention of their latents"
    )
    untie_embeddings_and_output_weights: bool = arg(
        False, "an output layer of its own instead of the embedding's weight"
    )
    hidden_dropout: float = arg(0.1, "dropout of the residual branches")
    attention_dropout: float = arg(0.1, "dropout of the attention weights")
    init_method_std: float = arg(
        0.02, "standard deviation of the initial weights (output projections: / sqrt(2 layers))"
    )
    position_embedding_init_std: float | None = arg(
        None, "standard deviation of the initial learned positions; default --init-method-std, as in Megatron (ours)"
    )
    transformer_impl: Literal["local", "transformer_engine"] = arg(
        "local", "local: this project's layers; transformer_engine: TransformerEngine's, for the recipes that it has"
    )
    attention_backend: Literal["auto", "local"] = arg(
        "auto", "auto: SDPA or TE; local: Megatron-core's unfused attention"
    )
    use_cpu_initialization: bool = arg(
        False, "draw the initial weights on the CPU: the same for every tensor-parallel size"
    )


@dataclass(frozen=True)
class TrainingOptions:
    """training"""

    micro_batch_size: int | None = arg(None, "samples of one forward pass on one rank; default: all of its share")
    global_batch_size: int | None = arg(None, "samples of one iteration; default micro-batch x data-parallel size")
    rampup_batch_size: list[int] | None = arg(
        None, "START INCREMENT SAMPLES: grow the global batch over the first SAMPLES; needs --train-samples"
    )
    train_iters: int | None = arg(None, "iterations of the whole run")
    train_samples: int | None = arg(None, "samples of the whole run, instead of --train-iters")
    bf16: bool = arg(False, "bf16 weights and activations, fp32 main weights")
    calculate_per_token_loss: bool = arg(
        False, "weigh every token of an iteration alike, where some carry no loss; else every microbatch. --sft does"
    )
    seed: int = arg(1234, "of weights, dropout, training order and stochastic rounding; validation's order is fixed")
    deterministic_mode: bool = arg(False, "only algorithms that give the same bits each time; slower on a GPU")
    no_gradient_accumulation_fusion: bool = arg(
        False, "round a weight gradient to bf16 before it is added to main_grad"
    )
    emulate: bool = arg(False, "multiply in the compute dtype also where the GPU has FP8 products")
    native: Literal["auto", "require", "off"] = arg(
        "auto",
        "MX and NVFP4 products of Blackwell, which the project has not run: auto compares the first of each size with "
        "the emulated one and goes on by emulation if they differ; require ends there, and where any is emulated; off "
        "emulates",
    )
    emulate_accumulator: bool = arg(
        False,
        "sum emulated GEMMs whose recipe has fast_accumulation as Hopper's FP8 units do, in 14 bits; slow, for small "
        "models",
    )
    recompute_granularity: Literal["full", "selective"] | None = arg(None, "recompute activations in the backward pass")
    recompute_gelu: bool = arg(
        False, "on a GPU, keep only the output of linear_fc1 and compute its GELU or SwiGLU again in the backward pass"
    )
    recompute_method: Literal["uniform", "block"] | None = arg(None, "which layers full recompute takes")
    recompute_num_layers: int | None = arg(
        None, "layers of one recomputed chunk (uniform) or recomputed layers (block)"
    )
    cuda_graph_impl: Literal["auto", "none", "local"] = arg(
        "auto",
        "local: capture each layer's forward and backward pass in CUDA graphs, so that the GPU does not wait for "
        "Python; auto: on GPUs where layers can be captured",
    )
    max_skipped_steps: int = arg(
        10, "stop with a report after so many iterations in a row whose loss or gradient was not finite (ours)"
    )
    exit_interval: int | None = arg(None, "save and stop at every iteration that this divides")
    exit_duration_in_mins: float | None = arg(None, "save and stop after so many minutes")
    exit_signal_handler: bool = arg(
        True, "save and stop at SIGTERM or SIGUSR1 (ours: on unless --no-exit-signal-handler)"
    )
    manual_gc: bool = arg(
        False, "collect Python's garbage at the same iterations on all ranks, not when a rank fills up"
    )
    manual_gc_interval: int = arg(0, "iterations between collections of --manual-gc; 0 for one at the start")
    no_manual_gc_eval: bool = arg(False, "leave out --manual-gc's collections around an evaluation")
    profile: bool = arg(False, "write a trace of torch's profiler into the run's folder")
    profile_step_start: int = arg(10, "first profiled iteration")
    profile_step_end: int = arg(12, "iteration at which profiling ends")


@dataclass(frozen=True)
class OptimizerOptions:
    """optimizer and schedule"""

    optimizer: Literal["adam"] = arg("adam", "AdamW")
    lr: float | None = arg(None, "peak learning rate")
    min_lr: float = arg(0.0, "learning rate at the end of the decay")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = arg(
        "linear", "shape of the decay"
    )
    lr_decay_iters: int | None = arg(None, "horizon of the learning rate; default --train-iters")
    lr_decay_samples: int | None = arg(None, "the same in samples; default --train-samples")
    lr_warmup_fraction: float | None = arg(None, "warm-up as a share of the horizon")
    lr_warmup_iters: int = arg(0, "warm-up in iterations")
    lr_warmup_samples: int = arg(0, "warm-up in samples")
    lr_warmup_init: float = arg(0.0, "learning rate that the warm-up starts from")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = arg(
        "exponential", "WSD's last phase"
    )
    lr_wsd_decay_iters: int | None = arg(None, "length of WSD's last phase")
    weight_decay: float = arg(0.01, "decoupled weight decay")
    start_weight_decay: float | None = arg(None, "weight decay at the start of --weight-decay-incr-style")
    end_weight_decay: float | None = arg(None, "weight decay at the end of it")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = arg(
        "constant", "how weight decay grows over the run"
    )
    clip_grad: float = arg(1.0, "largest gradient norm; 0 for no clipping")
    adam_beta1: float = arg(0.9, "decay of the first moment")
    adam_beta2: float = arg(0.999, "decay of the second moment")
    adam_eps: float = arg(1e-8, "added to the root of the second moment")
    override_opt_param_scheduler: bool = arg(
        False, "take the whole schedule from these options, not from the checkpoint"
    )
    use_checkpoint_opt_param_scheduler: bool = arg(
        False, "take the whole schedule from the checkpoint, flags notwithstanding"
    )


@dataclass(frozen=True)
class ParallelOptions:
    """parallelism"""

    tensor_model_parallel_size: int = arg(1, "ranks that share every layer")
    pipeline_model_parallel_size: int = arg(1, "stages that the layers are cut into")
    num_layers_per_virtual_pipeline_stage: int | None = arg(None, "interleave: layers of one chunk of a stage")
    num_virtual_stages_per_pipeline_rank: int | None = arg(None, "interleave: chunks of a stage")
    context_parallel_size: int = arg(1, "ranks that share a sequence (only --transformer-impl transformer_engine)")
    expert_model_parallel_size: int = arg(1, "ranks that share the experts")
    expert_tensor_parallel_size: int | None = arg(
        None,
        "ranks that share every expert: 1 with --expert-model-parallel-size above 1, else "
        "--tensor-model-parallel-size; no other layout is here",
    )
    sequence_parallel: bool = arg(False, "cut norms and dropout along the sequence, too")
    use_distributed_optimizer: bool = arg(False, "cut optimizer state over the data-parallel ranks")
    overlap_grad_reduce: bool = arg(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = arg(False, "gather weights during the forward pass")
    grad_reduce_in_bf16: bool = arg(False, "keep and reduce gradients in bf16 instead of fp32")
    distributed_backend: Literal["nccl", "gloo"] | None = arg(None, "default nccl with GPUs, else gloo")
    distributed_timeout_minutes: int = arg(10, "after which a collective fails")


@dataclass(frozen=True)
class MemoryOptions:
    """memory (ours)"""

    memory_plan: bool = arg(False, "print what a GPU will hold, part by part, and stop")
    memory_plan_gpus: int | None = arg(
        None, "GPUs to plan for; default those of this launch, but no fewer than the parallel sizes need"
    )
    no_memory_check: bool = arg(False, "start even where the plan does not fit into the GPU")


@dataclass(frozen=True)
class DataOptions:
    """data and tokenizer"""

    data_path: list[str] | None = arg(
        None, "prefixes of .bin/.idx or .jsonl files, each with a weight before it if you wish"
    )
    train_data_path: list[str] | None = arg(None, "the same for training only")
    valid_data_path: list[str] | None = arg(None, "the same for validation only")
    test_data_path: list[str] | None = arg(None, "the same for the test only")
    data_phase_switch: float | None = arg(
        None, "share of the run after which training goes on with --data-phase-path (ours)"
    )
    data_phase_switch_samples: int | None = arg(None, "the same in samples (ours)")
    data_phase_path: list[str] | None = arg(None, "the second blend, written as --data-path (ours)")
    sft: bool = arg(False, "the data are conversations (JSON lines with messages), learned on their answers only")
    sft_tokenizer_prompt_format: Literal["tulu"] = arg("tulu", "template that --sft writes conversations out by")
    mock_data: bool = arg(False, "random tokens of a fixed seed instead of data")
    split: str = arg("969,30,1", "how --data-path's documents are cut into train, validation and test")
    data_cache_path: str | None = arg(None, "where tokenized text and indices are kept; default data/cache")
    eod_mask_loss: bool = arg(False, "no loss on the token behind a document's end")
    reset_position_ids: bool = arg(
        False, "count learned positions from the start of each document; rope has distances, which it leaves alone"
    )
    reset_attention_mask: bool = arg(
        False,
        "let no token attend to an earlier document of its sample; slower, for GPUs' fastest kernels take no mask",
    )
    verify_data: bool = arg(
        False, "before training, read the data of each path and compare it with its checksums; once for the same files"
    )
    num_workers: int = arg(0, "processes that load data; 0 loads in this one (Megatron's default is 2)")
    tokenizer_type: Literal["GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "NullTokenizer"] = (
        arg("GPT2BPETokenizer", "kind of tokenizer")
    )
    tokenizer_model: str | None = arg(
        None,
        "tokenizer.json, or a folder with one, for HuggingFaceTokenizer; tokenizer.model for SentencePieceTokenizer",
    )
    vocab_file: str | None = arg(None, "vocab.json for GPT2BPETokenizer")
    merge_file: str | None = arg(None, "merges.txt for GPT2BPETokenizer")
    vocab_size: int | None = arg(None, "entries of NullTokenizer")
    make_vocab_size_divisible_by: int = arg(128, "pad the vocabulary to a multiple of this x tensor-parallel size")


@dataclass(frozen=True)
class CheckpointOptions:
    """checkpoints"""

    save: str | None = arg(None, "folder for checkpoints; default runs/CONFIG-RECIPE/checkpoints")
    no_save: bool = arg(False, "write no checkpoint (ours)")
    save_interval: int | None = arg(None, "iterations between checkpoints; the last one is always saved")
    keep_last: int | None = arg(None, "keep so many of the newest checkpoints and remove the others (ours)")
    async_save: bool = arg(False, "write checkpoints beside the training, in processes of their own")
    load: str | None = arg(
        None, "folder to continue from; may be --save's, empty or not; default --save's if it holds a checkpoint"
    )
    ckpt_step: int | None = arg(None, "iteration of the checkpoint to take; default the newest")
    pretrained_checkpoint: str | None = arg(
        None, "folder whose weights a new run begins with; of no effect where --save or --load holds a checkpoint"
    )
    finetune: bool = arg(False, "take only the weights and start at iteration 0")
    no_save_optim: bool = arg(False, "save no optimizer state; a run goes on from such a checkpoint by --no-load-optim")
    no_load_optim: bool = arg(False, "do not load the optimizer and the schedule's position")
    no_load_rng: bool = arg(False, "do not load the random state")


@dataclass(frozen=True)
class EvaluationOptions:
    """evaluation"""

    eval_interval: int = arg(1000, "iterations between validations")
    eval_iters: int = arg(100, "iterations of one validation or test; 0 for none anywhere")


@dataclass(frozen=True)
class LoggingOptions:
    """logging"""

    log_interval: int = arg(100, "iterations between log lines")
    log_params_norm: bool = arg(False, "log the norm of the weights")
    log_quantization_interval: int | None = arg(
        None,
        "iterations between snapshots of every quantized operand (SNR, bias, underflow, saturation, amax), which go to "
        "quantization.jsonl; default never",
    )
    log_quantization_also: list[str] = arg(
        [],
        "recipes (names or YAML files) whose quantizers are applied to the same tensors in each snapshot, as in "
        "mxfp8,fp8_blockwise; without delayed scaling",
    )
    capture_step: list[int] = arg(
        [], "iterations whose first microbatch's operands are written to captures/ in the run's folder; default none"
    )
    capture_layers: list[str] = arg(
        [], "linear layers whose operands are written, as in layers.3.mlp.linear_fc1; globs"
    )
    log_num_zeros_in_grad: bool = arg(False, "log how many gradient values are zero")
    tensorboard_dir: str | None = arg(None, "default: tensorboard in the run's folder")
    wandb_project: str | None = arg(None, "log to Weights & Biases, too")
    wandb_entity: str | None = arg(None, "W&B's team or user that owns the project; default yours")
    wandb_exp_name: str | None = arg(None, "name of the W&B run; default the run's folder")
    wandb_save_dir: str | None = arg(None, "W&B's own files; default the run's folder")


@dataclass(frozen=True)
class Config(
    LoggingOptions,
    EvaluationOptions,
    CheckpointOptions,
    DataOptions,
    MemoryOptions,
    ParallelOptions,
    OptimizerOptions,
    TrainingOptions,
    MoeOptions,
    LatentAttentionOptions,
    ModelOptions,
    RecipeOptions,
):
    """Options of one run. ``arguments.parse`` creates it; ``resolve.resolve`` fills derived fields."""

    config: str | None = arg(None, "YAML file with any of these options; the command line wins over it")


GROUPS: tuple[type, ...] = tuple(reversed(Config.__bases__))
