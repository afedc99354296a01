"""Tokens, entries and bytes of a microbatch on one rank."""

from __future__ import annotations

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.options.training_options import ParallelOptions, TrainingOptions


def tokens_of(config: Config) -> int:
    """Tokens of a microbatch on one rank, before sequence parallelism splits them."""
    return config.steps.micro_batch_size * config.shape.seq_length // config.context_parallel_size


def width_of(config: TrainingOptions) -> int:
    """Bytes of a value in the compute dtype."""
    return 2 if config.bf16 else 4


def sequence_ranks(config: ParallelOptions) -> int:
    """Ranks over which sequence parallelism splits norms, dropout and the residual stream."""
    return config.tensor_model_parallel_size if config.sequence_parallel else 1


def expert_tensor_ranks(config: ParallelOptions) -> int:
    """Ranks that shard each expert: none if experts are spread over ranks."""
    return 1 if config.expert_model_parallel_size > 1 else config.tensor_model_parallel_size


def stream_entries(config: Config) -> float:
    """Entries of the residual stream, as many as of an input of linear_qkv or of the MLP."""
    return tokens_of(config) * config.shape.hidden_size / sequence_ranks(config)


def stream_bytes(config: Config) -> float:
    """Bytes of the residual stream."""
    return stream_entries(config) * width_of(config)
